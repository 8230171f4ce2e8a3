"""Predicts what a compile would make and need, from configuration and tensor headers: without torch or weights.

`admission` validates requests, `build_plan` lists what a build has to make, `planner` answers PlanCompile. Must not
know protobuf.
"""
