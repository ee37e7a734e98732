// The time, once a second, for everything that counts down: the server's, since the times that it tells are by its clock.
export const now = $state({ ms: Date.now() });

/** How far this browser's clock is behind the server's. */
let behind = 0;

/** The server has told its time, somewhere between two times by this browser's clock. */
export function setClock(told: string, asked: number, answered: number): void {
  const server = Date.parse(told);
  if (Number.isNaN(server)) return;
  const apart = server - (asked + answered) / 2;
  // Within what asking takes, nobody knows better.
  behind = Math.abs(apart) > (answered - asked) / 2 + 1_000 ? apart : 0;
}

setInterval(() => (now.ms = Date.now() + behind), 1_000);
