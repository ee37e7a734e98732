// The server's time, updated once a second, for countdowns and ages.
export const now = $state({ ms: Date.now() });

/** Offset of this browser's clock behind the server's, in milliseconds. */
let behind = 0;

/** Sets the offset from a time in a response, given when it was requested and received. */
export function setClock(serverTime: string, sentAt: number, receivedAt: number): void {
  const server = Date.parse(serverTime);
  if (Number.isNaN(server)) return;
  const apart = server - (sentAt + receivedAt) / 2;
  // Within the round-trip time the offset cannot be measured.
  behind = Math.abs(apart) > (receivedAt - sentAt) / 2 + 1_000 ? apart : 0;
}

setInterval(() => (now.ms = Date.now() + behind), 1_000);
