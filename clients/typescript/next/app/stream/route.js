import { guarded } from "../guarded.js";

// A body that ends only when its reader leaves.
export const GET = guarded(() => new Response(new ReadableStream({ pull: (stream) => stream.enqueue(new Uint8Array(1024)) }, { highWaterMark: 0 })));
