// The time, once a second, for everything that counts down.
export const now = $state({ ms: Date.now() });
setInterval(() => (now.ms = Date.now()), 1_000);
