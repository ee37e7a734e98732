import { guarded } from "../guarded.js";

export const GET = guarded(() => { throw new Error("broken"); });
