import assert from "node:assert/strict";
import { it } from "node:test";
import { create, type Message, type MessageInitShape } from "@bufbuild/protobuf";
import type { ServerWritableStream } from "@grpc/grpc-js";
import { Bundles } from "kiln-client";
import { BundleService, type ImportBundleRequest, ImportBundleResponseSchema } from "kiln-client/messages";
import { rejection } from "../waiting.js";
import { ScriptedServer } from "./server.js";

type Event = MessageInitShape<typeof ImportBundleResponseSchema>["event"];

const PROGRESS: Event = { case: "progress", value: { doneBytes: 1n, totalBytes: 2n ** 60n } };
const RESULT: Event = { case: "result", value: { copiedBlobCount: 3, bundle: { name: "copy", version: 1 } } };

async function withImport(
  events: Event[],
  use: (bundles: Bundles, request: () => ImportBundleRequest) => Promise<void>,
) {
  let request: ImportBundleRequest | undefined;
  const importBundle = (call: ServerWritableStream<Message, Message>) => {
    request = call.request as ImportBundleRequest;
    for (const event of events) {
      call.write(create(ImportBundleResponseSchema, { event }));
    }
    call.end();
  };
  const server = await ScriptedServer.start(BundleService, { importBundle });
  using bundles = new Bundles(server.address);
  try {
    await use(bundles, () => {
      assert.ok(request);
      return request;
    });
  } finally {
    server.stop();
  }
}

it("imports, telling its progress; an empty etag is not an unset one", () =>
  withImport([PROGRESS, RESULT], async (bundles, request) => {
    const totals: bigint[] = [];
    const onProgress = ({ totalBytes }: { totalBytes: bigint }) => totals.push(totalBytes);
    const result = await bundles.importBundle("/layouts/a", "copy", { alias: "live", aliasEtag: "", onProgress });
    assert.equal(result.bundle?.name, "copy");
    assert.deepEqual(totals, [2n ** 60n]);
    assert.deepEqual([request().layout, request().alias, request().aliasEtag], ["/layouts/a", "live", ""]);
    await bundles.importBundle("/layouts/a", "copy");
    assert.equal(request().aliasEtag, undefined);
  }));

it("refuses an import that ends without a result", () =>
  withImport([PROGRESS], async (bundles) => {
    assert.equal((await rejection(bundles.importBundle("/layouts/a", "copy"))).reason, "STREAM_INCOMPLETE");
  }));
