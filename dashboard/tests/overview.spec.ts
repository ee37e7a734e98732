// The overview: charts that can be read, figures that agree, ranges that are kept, and requests that no rule limits.
import type { Locator, Page } from '@playwright/test';
import { choose, expect, open, Server, test } from './server';

const chart = (page: Page, name: string) => page.locator('figure').filter({ has: page.getByRole('heading', { name }) });
const values = (figure: Locator) => figure.locator('figcaption li b').allTextContents();

/** Some traffic of this second, so that charts have something to show. */
async function traffic(server: Server, key: string): Promise<void> {
  for (let i = 0; i < 12; i++) await server.check({ api_key: key });
}

test('a chart draws a crosshair and holds the hovered time and values while data moves on', async ({ page, server }) => {
  await traffic(server, 'crosshair-0123456789');
  await open(page, server, 'overview');
  const [rates, latency] = [chart(page, 'Decisions per second'), chart(page, 'Latency')];
  const cross = rates.getByTestId('crosshair');
  await expect(cross).toHaveCount(0);
  await expect(rates.locator('.when')).toHaveText('10 s mean');
  // Enough seconds for the pointer to be on one in the middle.
  await expect.poll(async () => ((await (await fetch(`${server.admin}/admin/v1/stats`)).json()) as { series: { t: number[] } }).series.t.length).toBeGreaterThan(6);
  await expect(async () => {
    const plot = await rates.locator('.u-over').boundingBox();
    await page.mouse.move((plot?.x ?? 0) + (plot?.width ?? 0) * 0.7, (plot?.y ?? 0) + 40);
    await expect(cross).toBeVisible({ timeout: 1_000 });
  }).toPass();
  await expect(rates.locator('.when')).toHaveText(/^\d\d:\d\d:\d\d$/);
  const [time, shown] = [await rates.locator('.when').textContent(), await values(rates)];
  const before = await cross.boundingBox();
  await expect(latency.locator('.when'), 'the other chart shows the same second').toHaveText(time ?? '');
  await expect(latency.getByTestId('crosshair')).toBeVisible();
  // Data moves on under the pointer, which stays where it is.
  await traffic(server, 'crosshair-0123456789');
  await expect.poll(async () => (await cross.boundingBox())?.x).not.toBe(before?.x);
  await expect(rates.locator('.when')).toHaveText(time ?? '');
  expect(await values(rates), 'the values are those of that second').toEqual(shown);
  await page.mouse.move(5, 5);
  await expect(cross).toHaveCount(0);
  await expect(rates.locator('.when')).toHaveText('10 s mean');
});

test('percentiles are distinguishable without color', async ({ page, server }) => {
  await open(page, server, 'overview');
  const marks = chart(page, 'Latency').locator('figcaption li');
  await expect(marks).toHaveCount(3);
  const dashes = await marks.locator('line').evaluateAll((all) => all.map((one) => one.getAttribute('stroke-dasharray') ?? 'solid'));
  expect(new Set(dashes).size, dashes.join('; ')).toBe(3);
});

test('tiles and charts agree, and state their windows', async ({ page, server }) => {
  await traffic(server, 'agrees-0123456789');
  await open(page, server, 'overview');
  const tile = (name: string) => page.locator('.tiles > div').filter({ has: page.getByText(name, { exact: true }) });
  for (const name of ['Decisions per second', 'Denied', 'Failed open', 'Unmatched']) await expect(tile(name)).toContainText('10 s mean');
  await expect(tile('Latency p99')).toContainText('latest second');
  await expect(chart(page, 'Latency').locator('.when')).toHaveText('latest second');
  // Read at one moment: both change every second.
  const read = () =>
    page.evaluate(() => {
      const text = (selector: string) => [...document.querySelectorAll(selector)].map((one) => one.textContent ?? '');
      const [, , p99] = text('.tiles > div');
      return { tile: p99 ?? '', legend: text('figure:nth-of-type(1) figcaption li b'), denied: text('.tiles > div')[1] ?? '' };
    });
  await expect.poll(async () => (await read()).legend.length).toBe(7);
  const now = await read();
  const [, denied, , , , p99] = now.legend;
  expect(now.tile).toContain(`Latency p99${p99}`);
  expect(now.denied).toContain(`${denied}/s`);
});

test('the chosen range is kept in the address', async ({ page, server }) => {
  await open(page, server, 'overview');
  const range = (name: string) => page.getByRole('group', { name: 'Time range' }).getByRole('button', { name, exact: true });
  await expect(range('5 min')).toHaveAttribute('aria-pressed', 'true');
  await range('1 h').click();
  await expect(page).toHaveURL(/#\/overview\?range=1h$/);
  await page.reload();
  await expect(range('1 h')).toHaveAttribute('aria-pressed', 'true');
  await page.getByRole('link', { name: 'Decisions', exact: true }).click();
  await page.getByRole('link', { name: 'Overview' }).click();
  await expect(range('1 h'), 'and over other views').toHaveAttribute('aria-pressed', 'true');
  await expect(page).toHaveURL(/range=1h$/);
  const asked = page.waitForRequest(/stats\?seconds=900$/);
  await page.evaluate(() => (location.hash = '#/overview?range=15m'));
  await asked;
  await expect(range('15 min')).toHaveAttribute('aria-pressed', 'true');
});

test('unmatched requests and unknown domains are counted and shown', async ({ page }) => {
  const server = await new Server('unmatched').start('domain: sample\ndescriptors:\n  - {key: api_key, name: per-key, limit: 5/hour}\n');
  try {
    for (let i = 0; i < 3; i++) await server.check({ color: 'red' });
    for (let i = 0; i < 4; i++) await server.check({ api_key: 'k' }, 'smaple');
    const stats = async () => (await (await fetch(`${server.admin}/admin/v1/stats`)).json()) as { unmatched: unknown; unknown_domains: unknown; series: { unmatched: number[] } };
    await expect.poll(async () => (await stats()).series.unmatched.reduce((sum, one) => sum + one, 0)).toBe(7);
    expect(await stats()).toMatchObject({ unmatched: [{ domain: 'sample', requests: 3 }], unknown_domains: { requests: 4, domains: [{ domain: 'smaple', requests: 4 }] } });
    await open(page, server, 'overview');
    await expect(page.getByText('4 requests of unknown domains')).toBeVisible();
    await expect(page.getByText('smaple')).toBeVisible();
    await page.getByRole('link', { name: 'View domains' }).click();
    await expect(page.getByText('3 unmatched requests')).toBeVisible();
    await expect(page.getByRole('region', { name: 'Unknown domains' }).getByRole('row').filter({ hasText: 'smaple' })).toContainText('4');
    // A mean of ten seconds: of requests that still come.
    await open(page, server, 'overview');
    const tile = page.locator('.tiles > div').filter({ hasText: 'Unmatched' });
    await expect(async () => {
      for (let i = 0; i < 5; i++) await server.check({ color: 'red' });
      await expect(tile).toContainText(/^Unmatched0\.[1-9]\/s|^Unmatched[1-9]/, { timeout: 2_000 });
    }).toPass();
  } finally {
    await server.stop();
  }
});

test('a caller is blocked from the menu of its row', async ({ page }) => {
  const server = await new Server('block').start();
  try {
    const key = 'block-from-menu-0123456789';
    await server.exhaust({ api_key: key });
    await open(page, server, 'overview');
    const row = page.getByRole('region', { name: 'Top denied callers' }).getByRole('row').filter({ hasText: 'per-key' });
    const opener = row.getByRole('button', { name: /^Actions for/ });
    await opener.focus();
    await page.keyboard.press('Enter');
    const items = page.getByRole('menuitem');
    await expect(items).toHaveText(['Explain denial', 'Usage', 'Override limit…', 'Block…']);
    await expect(items.first()).toBeFocused();
    await page.keyboard.press('ArrowUp');
    await expect(items.last()).toBeFocused();
    await page.keyboard.press('Escape');
    await expect(items.first()).toBeHidden();
    await expect(opener).toBeFocused();

    await choose(page, row, 'Block…');
    const dialog = page.getByRole('dialog');
    await expect(dialog.getByRole('heading')).toHaveText(/^Block block-…/);
    await dialog.getByLabel('Reason').fill('incident 8');
    await dialog.getByRole('button', { name: 'Block', exact: true }).click();
    await expect(dialog).toHaveCount(0);
    await expect(page.getByText('incident 8'), 'every view shows it').toBeVisible();
    await server.ask('POST', `/admin/v1/usage/${key}/reset`, { reason: 'ticket 1' });
    expect(await server.check({ api_key: key }), 'blocked, whatever its limits').toBe(false);
  } finally {
    await server.stop();
  }
});

test('an open menu follows its row', async ({ page }) => {
  const server = await new Server('follow').start();
  try {
    const [loud, soft] = ['loud-0123456789', 'soft-0123456789'];
    for (const key of [loud, soft]) await server.exhaust({ api_key: key });
    await server.check({ api_key: loud });
    await page.setViewportSize({ width: 1280, height: 500 });
    await open(page, server, 'overview');
    const rows = page.getByRole('region', { name: 'Top denied callers' }).locator('tbody tr');
    const openers = rows.getByRole('button', { name: /^Actions for/ });
    const item = page.getByRole('menuitem', { name: 'Usage' });
    await expect(rows).toHaveText([/^lou…/, /^sof…/]);
    // The menu of the row that rises, then of the one that falls.
    for (const [at, key, order] of [[1, soft, [/^sof…/, /^lou…/]], [0, loud, [/^lou…/, /^sof…/]]] as const) {
      await openers.nth(at).click();
      await expect(item).toBeVisible();
      for (let i = 0; i < 10; i++) await server.check({ api_key: key });
      await expect(rows).toHaveText([...order]);
      await expect(item).toBeVisible();
      await page.keyboard.press('Escape');
      await expect(item).toBeHidden();
    }
    const opener = openers.first();
    await opener.click();
    const beside = async () => {
      const [button, menu] = [await opener.boundingBox(), await page.getByRole('menu').boundingBox()];
      return button && menu ? Math.min(Math.abs(menu.y - button.y - button.height), Math.abs(menu.y + menu.height - button.y)) : 1_000;
    };
    await expect.poll(beside).toBeLessThan(10);
    await page.mouse.wheel(0, 40);
    await expect.poll(beside).toBeLessThan(10);
    await expect(item).toBeVisible();
    await page.evaluate(() => scrollTo(0, 0));
    await page.evaluate(() => scrollTo(0, document.documentElement.scrollHeight));
    await expect(item, 'its row is out of sight').toBeHidden();
    await expect(opener).toHaveAttribute('aria-expanded', 'false');
  } finally {
    await server.stop();
  }
});

test('an explained decision says each thing once', async ({ page, server }) => {
  await server.exhaust({ api_key: 'only-once-0123456789' });
  await open(page, server, 'decisions?verdict=deny&rule=per-key');
  const opener = page.getByRole('button', { name: /^Explain decision/ }).first();
  await expect(opener, 'to the millisecond').toHaveText(/\d\d:\d\d:\d\d\.\d{3}$/);
  await opener.click();
  const dialog = page.getByRole('dialog', { name: 'Decision explained' });
  await expect(dialog.getByText('Decision ID')).toBeVisible();
  const text = (await dialog.textContent()) ?? '';
  for (const once of ['per-key', '5 per 1h', 'gcra', 'sample', 'http', 'Used before', 'Remaining', 'Retry after', 'enied']) expect(text.split(once).length - 1, `${once} in ${text}`).toBe(1);
});

test('a cell whose peer is silent says that it decides alone', async ({ page }) => {
  const server = new Server('cell');
  // Nobody listens at the discard port.
  server.flags = ['--cell', '127.0.0.1:0', '--cell-url', 'http://127.0.0.1:7999', '--peer', 'us=http://127.0.0.1:9'];
  try {
    await server.start();
    await open(page, server, 'overview');
    const panel = page.getByRole('region', { name: 'Regions' });
    await expect(panel.getByRole('status')).toContainText('Regional only');
    const row = panel.getByRole('row').filter({ hasText: '127.0.0.1:9' });
    await expect(row).toContainText('us');
    await expect(row).toContainText('silent');
  } finally {
    await server.stop();
  }
});
