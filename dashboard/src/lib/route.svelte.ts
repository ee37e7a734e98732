// The view that is shown, and its words, from what follows # in the address: #/decisions?verdict=deny
export const VIEWS = ['overview', 'rules', 'quotas', 'decisions', 'audit', 'emergency'] as const;
export type View = (typeof VIEWS)[number];

class Route {
  view = $state<View>('overview');
  words = $state.raw(new URLSearchParams());

  constructor() {
    this.read();
    addEventListener('hashchange', () => this.read());
  }

  private read(): void {
    const [name = '', words = ''] = location.hash.replace(/^#\/?/, '').split('?');
    this.view = VIEWS.find((view) => view === name) ?? 'overview';
    this.words = new URLSearchParams(words);
  }

  /** Changes the words of this view without a step in the history. */
  replace(words: Record<string, string>): void {
    const set = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== ''));
    const text = set.toString();
    history.replaceState(null, '', `#/${this.view}${text ? `?${text}` : ''}`);
    this.words = set;
  }
}

export const route = new Route();

export function link(view: View, words: Record<string, string> = {}): string {
  const text = new URLSearchParams(words).toString();
  return `#/${view}${text ? `?${text}` : ''}`;
}
