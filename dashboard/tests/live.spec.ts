// What is of this second and what is not: streams, windows side by side, a server that goes away, clocks that differ, long names.
import { choose, expect, open, Server, test } from './server';

test('windows side by side leave connections for asking', async ({ page, server }) => {
  const pages = [page];
  while (pages.length < 8) pages.push(await page.context().newPage());
  for (const one of pages) await open(one, server, 'emergency');
  // Three have a stream; the others ask, and all of them can.
  const told = (text: string) => Promise.all(pages.map((one) => one.getByText(text, { exact: true }).count())).then((all) => all.reduce((sum, many) => sum + many));
  await expect.poll(() => told('live')).toBe(3);
  await expect.poll(() => told('polling')).toBe(5);
  for (const one of pages) expect(await one.evaluate(() => fetch('/admin/v1/emergency').then((answer) => answer.status))).toBe(200);
  // A seat that is left is taken.
  const listens = await Promise.all(pages.map((one) => one.getByText('live', { exact: true }).count()));
  const first = listens.findIndex((many) => many === 1);
  await pages[first]?.close();
  pages.splice(first, 1);
  await expect.poll(() => told('live'), { timeout: 20_000 }).toBe(3);
  for (const one of pages) if (one !== page) await one.close();
});

test('stats of an unreachable server are marked as old', async ({ page }) => {
  const server = await new Server('gone').start();
  try {
    await open(page, server, 'overview');
    await expect(page.getByText('up to date')).toBeVisible();
    await server.pause();
    await expect(page.getByText('Server unreachable.')).toBeVisible({ timeout: 20_000 });
    await expect(page.getByText('up to date')).toHaveCount(0);
    await server.restart();
    await expect(page.getByText('Server unreachable.')).toHaveCount(0, { timeout: 20_000 });
    await expect(page.getByText('up to date')).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('time is counted by the clock of the server', async ({ page, server }) => {
  await page.clock.install({ time: Date.now() + 15 * 60_000 });
  await open(page, server, 'overview');
  await page.clock.runFor(2_000);
  const row = page.getByRole('row').filter({ hasText: 'this node' });
  await expect(row).toBeVisible();
  await expect(async () => {
    await page.clock.runFor(1_000);
    expect(await row.innerText()).not.toMatch(/min/);
  }).toPass();
});

test('long names and marks that turn text around disturb nobody', async ({ page, server }) => {
  const long = 'x'.repeat(300);
  await server.exhaust({ tenant: long, remote_address: '10.9.9.9' });
  await server.exhaust({ tenant: '\u202egpj.exe', remote_address: '10.9.8.9' });
  for (const width of [360, 1920]) {
    await page.setViewportSize({ width, height: 900 });
    for (const view of ['overview', 'decisions']) {
      await open(page, server, view);
      await expect(page.getByText(/^(tenant )?x{70,79}…$/).first()).toBeVisible();
      await expect(page.getByText('⟨U+202E⟩gpj.exe').first()).toBeVisible();
      const over = await page.evaluate(() => [document.documentElement, ...document.querySelectorAll('.panel, .scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length);
      expect(over, `${view} at ${width} px does not scroll sideways`).toBe(0);
    }
  }
});

test('an address that changes is searched for', async ({ page, server }) => {
  await open(page, server, 'decisions?rule=per-key');
  await expect(page.getByLabel('Rule')).toHaveValue('per-key');
  await page.evaluate(() => (location.hash = '#/decisions?verdict=deny&rule=logins'));
  await expect(page.getByLabel('Rule')).toHaveValue('logins');
  await expect(page.getByLabel('Verdict')).toHaveValue('deny');
  await page.getByRole('link', { name: 'Decisions' }).click();
  await expect(page.getByLabel('Rule')).toHaveValue('');
});

test('rules of two domains with one name are told apart', async ({ page }) => {
  const rules = (domain: string, count: number) => `domain: ${domain}\ndescriptors:\n  - {key: api_key, name: jobs, limit: ${count}/hour}\n`;
  const server = await new Server('domains').start(rules('sample', 3), rules('batch', 7));
  try {
    for (const domain of ['sample', 'batch']) for (let i = 0; i < 9; i++) await server.check({ api_key: 'both-4242424242' }, domain);
    await open(page, server, 'overview');
    for (const [domain, limit] of [['sample', 3], ['batch', 7]] as const) {
      const row = page.getByRole('row').filter({ hasText: `jobs (${domain})` });
      await choose(page, row, 'Explain denial');
      await expect(page.getByRole('dialog').getByText(`${limit} per 1h`)).toBeVisible();
      await page.keyboard.press('Escape');
      await choose(page, row, 'Usage');
      await expect(page.getByRole('dialog').getByText(/jobs/).first()).toBeVisible();
      await expect(page.getByRole('dialog').getByLabel('Domain')).toHaveValue(domain);
      await page.keyboard.press('Escape');
    }
  } finally {
    await server.stop();
  }
});
