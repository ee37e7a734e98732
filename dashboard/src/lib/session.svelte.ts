// The session: the principal, its role, and what the server supports.
import type { Session } from './types';

const ranks = { replica: 0, viewer: 1, operator: 2, admin: 3 } as const;

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
      this.failed = error instanceof TypeError ? 'Server unreachable.' : String(error);
    }
  }

  needsLogin(): void {
    this.state = { name: null, role: null, needs_login: true, database: null };
  }

  /** Whether the server stores changes: quotas, measures, published rules and the audit log need a database. */
  get hasDatabase(): boolean {
    return this.state?.database !== null && this.state?.database !== undefined;
  }

  /** Whether this principal may make changes, and the server can store them. */
  get canEdit(): boolean {
    return this.can('operator') && this.hasDatabase;
  }

  can(role: 'viewer' | 'operator' | 'admin'): boolean {
    const own = this.state?.role;
    return own !== null && own !== undefined && ranks[own] >= ranks[role];
  }
}

export const session = new SessionStore();
