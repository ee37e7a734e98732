// The current view and its parameters, from the fragment of the address: #/decisions?verdict=deny
export const VIEWS = ['overview', 'rules', 'quotas', 'decisions', 'explain', 'audit', 'emergency'] as const;
export type View = (typeof VIEWS)[number];

/** Time ranges of the overview; the first is the default. */
export const RANGES = [
  { name: '5m', label: '5 min', seconds: 300 },
  { name: '15m', label: '15 min', seconds: 900 },
  { name: '1h', label: '1 h', seconds: 3_600 },
] as const;

/** The range that the parameters name, in seconds. */
export function rangeOf(words: URLSearchParams): number {
  return (RANGES.find((range) => range.name === words.get('range')) ?? RANGES[0]).seconds;
}

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

  /** Replaces the parameters of this view without a history entry. */
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
