/** A real gRPC server on loopback whose answers a test writes. */

import {
  create,
  type DescMessage,
  type DescMethod,
  type DescService,
  fromBinary,
  type Message,
  type MessageInitShape,
  toBinary,
} from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import {
  type handleServerStreamingCall,
  type handleUnaryCall,
  Metadata,
  Server,
  ServerCredentials,
  type ServiceDefinition,
  type UntypedServiceImplementation,
} from "@grpc/grpc-js";
import { Code } from "../../src/gen/google/rpc/code_pb.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../../src/gen/google/rpc/status_pb.js";

export type Unary = handleUnaryCall<Message, Message>;
export type Streaming = handleServerStreamingCall<Message, Message>;

/** A server of one service, on a free port of 127.0.0.1. Methods without an answer are UNIMPLEMENTED. */
export class ScriptedServer {
  readonly #server = new Server();
  address = "";

  static async start(
    service: DescService,
    answers: Record<string, Unary | Streaming>,
    credentials = ServerCredentials.createInsecure(),
    address = "127.0.0.1:0",
  ): Promise<ScriptedServer> {
    const server = new ScriptedServer();
    const definition = Object.fromEntries(service.methods.map((method) => [method.localName, definitionOf(method)]));
    server.#server.addService(definition as ServiceDefinition, answers as UntypedServiceImplementation);
    const port = await new Promise<number>((resolve, reject) =>
      server.#server.bindAsync(address, credentials, (error, bound) => (error ? reject(error) : resolve(bound))),
    );
    server.address = `127.0.0.1:${port}`;
    return server;
  }

  /** Cuts every connection. */
  stop(): void {
    this.#server.forceShutdown();
  }
}

/** What a Kiln service ends a failed call with: a status and its details. */
export function failure(
  code: keyof typeof Code,
  message: string,
  details: {
    info?: MessageInitShape<typeof ErrorInfoSchema>;
    request?: MessageInitShape<typeof BadRequestSchema>;
    retry?: MessageInitShape<typeof RetryInfoSchema>;
  } = {},
) {
  const packed = [
    ...(details.info ? [anyPack(ErrorInfoSchema, create(ErrorInfoSchema, details.info))] : []),
    ...(details.request ? [anyPack(BadRequestSchema, create(BadRequestSchema, details.request))] : []),
    ...(details.retry ? [anyPack(RetryInfoSchema, create(RetryInfoSchema, details.retry))] : []),
  ];
  const status = create(StatusSchema, { code: Code[code], message, details: packed });
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, status)));
  return { code: Code[code] as number, details: message, metadata };
}

function definitionOf(method: DescMethod) {
  return {
    path: `/${method.parent.typeName}/${method.name}`,
    requestStream: false,
    responseStream: method.methodKind === "server_streaming",
    ...codec("request", method.input),
    ...codec("response", method.output),
  };
}

function codec(side: "request" | "response", schema: DescMessage) {
  return {
    [`${side}Serialize`]: (message: Message) => Buffer.from(toBinary(schema, message)),
    [`${side}Deserialize`]: (bytes: Buffer) => fromBinary(schema, bytes),
  };
}
