"""What a compile would make and take, from configuration and tensor headers alone: no torch, no weight is read.

`admission` validates requests, `build_plan` says what a build has to make, `planner` answers PlanCompile. Must not know
protobuf.
"""
