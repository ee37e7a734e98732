// On narrow screens table rows become compact cards; this gives each cell the label of its column,
// or the shorter one in `data-card`, with which a row of figures fits one line.
export function cards(table: HTMLTableElement): () => void {
  const label = () => {
    const names = [...(table.tHead?.rows[0]?.cells ?? [])].map((cell) => (cell.querySelector('.out') ? '' : (cell.dataset.card ?? cell.textContent ?? '').trim()));
    for (const row of table.tBodies[0]?.rows ?? []) {
      for (const cell of row.cells) {
        const name = names[cell.cellIndex] ?? '';
        if (cell.dataset.label !== name) cell.dataset.label = name;
      }
    }
  };
  label();
  const watching = new MutationObserver(label);
  watching.observe(table, { childList: true, subtree: true });
  return () => watching.disconnect();
}
