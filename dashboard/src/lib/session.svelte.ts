// Who looks at the page, and what they may do.
import type { Session } from './types';

const ranks = { viewer: 1, operator: 2, admin: 3 } as const;

class SessionStore {
  state = $state<Session | null>(null);
  failed = $state<string | null>(null);

  async load(): Promise<void> {
    try {
      const answer = await fetch('/admin/v1/session', { credentials: 'same-origin' });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      this.state = (await answer.json()) as Session;
      this.failed = null;
    } catch (error) {
      this.failed = error instanceof TypeError ? 'The server does not answer.' : String(error);
    }
  }

  needsLogin(): void {
    this.state = { name: null, role: null, needs_login: true };
  }

  can(role: 'viewer' | 'operator' | 'admin'): boolean {
    const own = this.state?.role;
    return own !== null && own !== undefined && ranks[own] >= ranks[role];
  }
}

export const session = new SessionStore();
