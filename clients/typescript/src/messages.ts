/** The API's messages, enums and schemas, as the `.proto` files describe them. `int64` fields are `bigint`. */

export type { Operation } from "./gen/google/longrunning/operations_pb.js";
export { OperationSchema } from "./gen/google/longrunning/operations_pb.js";
export type { Status } from "./gen/google/rpc/status_pb.js";
export { StatusSchema } from "./gen/google/rpc/status_pb.js";
export * from "./gen/kiln/bundle/v1/bundle_pb.js";
export * from "./gen/kiln/compiler/v1/compiler_pb.js";
export * from "./gen/kiln/config/v1/config_pb.js";
export * from "./gen/kiln/runtime/v1/generation_pb.js";
export * from "./gen/kiln/runtime/v1/runtime_pb.js";
