// Short confirmations that disappear by themselves.
export interface Toast {
  id: number;
  text: string;
}

let last = 0;
export const toasts = $state<{ list: Toast[] }>({ list: [] });

export function toast(text: string): void {
  const id = ++last;
  toasts.list = [...toasts.list.slice(-3), { id, text }];
  setTimeout(() => (toasts.list = toasts.list.filter((toast) => toast.id !== id)), 6_000);
}
