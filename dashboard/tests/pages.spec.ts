// Pages of a rule and a caller, and the history behind them: what people look for has an address that can be shared.
import { expect, open, RULES, Server, test } from './server';
import type { Page } from '@playwright/test';

const key = 'paged-0123456789';

/** A server whose database has a history: the last minute is stored at a graceful end. */
async function withHistory(name: string): Promise<Server> {
  const server = await new Server(name).start();
  await server.exhaust({ api_key: key });
  for (let i = 0; i < 3; i++) await server.check({ api_key: key });
  await server.redeploy();
  return server;
}
const tile = (page: Page, name: string) => page.locator('.tiles > div').filter({ has: page.getByText(name, { exact: true }) }).locator('dd');

test('a rule has a page with its history, callers, text and changes', async ({ page }) => {
  const server = await withHistory('ruled');
  try {
    await server.ask('POST', '/admin/v1/rules', { files: [{ name: 'rules.yaml', text: RULES.replace('limit: 2/hour', 'limit: 3/hour') }], reason: 'ticket other' });
    await server.ask('POST', '/admin/v1/rules', { files: [{ name: 'rules.yaml', text: RULES.replace('limit: 2/hour', 'limit: 3/hour').replace('30/minute', '40/minute') }], reason: 'ticket network' });
    await open(page, server, 'rules');
    await page.getByRole('link', { name: 'per-key', exact: true }).click();
    await expect(page).toHaveURL(/#\/rule\?domain=sample&rule=per-key$/);
    await expect(page.getByRole('heading', { level: 1, name: 'Rule per-key' })).toBeVisible();
    await expect(tile(page, 'Allowed')).toHaveText('5');
    await expect(tile(page, 'Denied')).toHaveText('4');
    await expect(page.getByRole('region', { name: 'Most denied callers' }).getByRole('row').filter({ hasText: 'page…' })).toContainText('4');
    await expect(page.getByRole('region', { name: 'Rule text' }).locator('pre')).toContainText('name: per-key');
    await expect(page.getByRole('link', { name: 'Rules', exact: true })).toHaveAttribute('aria-current', 'page');

    await page.goto(`${server.admin}/#/rule?domain=sample&rule=per-network`);
    await page.getByRole('button', { name: 'Search revisions' }).click();
    const changes = page.getByRole('region', { name: 'Changes' });
    await expect(changes.getByRole('row').filter({ hasText: 'ticket network' })).toContainText('40/minute');
    await expect(changes.getByText('ticket other'), 'it changed another rule').toHaveCount(0);
    await page.getByRole('link', { name: 'Open in editor' }).click();
    await expect(page.getByRole('textbox', { name: 'Rule file rules.yaml' })).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('a caller has a page to act on', async ({ page }) => {
  const server = await withHistory('called');
  try {
    await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', reason: 'ticket 7' });
    await server.check({ api_key: key });
    await server.exhaust({ api_key: key, endpoint: 'POST /login' });
    await open(page, server, 'decisions?verdict=deny');
    await page.getByRole('row').filter({ hasText: 'page…' }).first().getByRole('link', { name: /^page…/ }).click();
    await expect(page).toHaveURL(/#\/caller\?id=[0-9a-f]{16}$/);
    await expect(page.getByRole('heading', { level: 1, name: /^Caller page…/ })).toBeVisible();
    // Four and five, and what has come since the restart once that is saved: one, and up to three.
    await expect(tile(page, 'Denied')).toHaveText(/^[45]$/);
    await expect(tile(page, 'Allowed')).toHaveText(/^[5-8]$/);
    await expect(page.getByRole('region', { name: 'Denied by' }).getByRole('row').filter({ hasText: 'per-key' })).toContainText('4');
    await expect(page.getByRole('region', { name: 'Usage' }).getByRole('row').filter({ hasText: 'per-key' })).toContainText('100 / 1h');
    await expect(page.getByRole('region', { name: 'Quota' })).toContainText('ticket 7');
    await expect(page.getByRole('region', { name: 'Recent decisions' }).getByRole('row').filter({ hasText: 'logins' }).first()).toContainText('denied');
    const address = page.url();

    await page.getByRole('button', { name: 'Block…' }).click();
    await page.getByLabel('Reason').fill('incident 8');
    await page.getByRole('dialog').getByRole('button', { name: 'Block' }).click();
    await expect(page.getByText('incident 8')).toBeVisible();
    expect(await server.check({ api_key: key })).toBe(false);
    // The address shows the same to somebody else.
    await page.goto('about:blank');
    await page.goto(address);
    await expect(tile(page, 'Denied')).toHaveText(/^[456]$/);
  } finally {
    await server.stop();
  }
});

test('the page of a caller shows the limits of the plan that its requests carry', async ({ page, server }) => {
  for (let i = 0; i < 3; i++) await server.check({ api_key: 'planned-0123456789', tier: 'pro' });
  await open(page, server, 'overview');
  await page.getByRole('link', { name: /^plan…/ }).first().click();
  const usage = page.getByRole('region', { name: 'Usage' });
  await expect(usage).toContainText('Tier: pro (from its latest request)');
  await expect(usage.getByRole('row').filter({ hasText: 'per-key' })).toContainText('100 / 1h');
});

test('ranges go beyond an hour, and a drag over a chart zooms, in the address', async ({ page }) => {
  const server = await withHistory('ranged');
  try {
    await open(page, server, 'overview');
    await page.getByRole('group', { name: 'Time range' }).getByRole('button', { name: '7 d', exact: true }).click();
    await expect(page).toHaveURL(/#\/overview\?range=7d$/);
    await expect(page.getByText('History is kept for 30 days.')).toBeVisible();
    const plot = page.locator('figure').first().locator('.u-over');
    const box = await plot.boundingBox();
    if (!box) throw new Error('no chart');
    await page.mouse.move(box.x + box.width * 0.25, box.y + 40);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.4, box.y + 40);
    await page.mouse.move(box.x + box.width * 0.5, box.y + 40);
    await page.mouse.up();
    await expect(page).toHaveURL(/#\/overview\?from=.*&to=/);
    const words = new URLSearchParams(page.url().split('?')[1]);
    const hours = (Date.parse(words.get('to') ?? '') - Date.parse(words.get('from') ?? '')) / 3_600_000;
    expect(hours, 'a quarter of a week').toBeGreaterThan(38);
    expect(hours).toBeLessThan(46);
    await page.reload();
    await expect(page.getByText('History is kept for 30 days.')).toBeVisible();
    await page.getByRole('button', { name: 'Zoom in' }).click();
    await expect(page).not.toHaveURL(new RegExp(`from=${encodeURIComponent(words.get('from') ?? '')}`));
    await page.goBack();
    await page.goBack();
    await expect(page.getByRole('button', { name: '7 d', exact: true })).toHaveAttribute('aria-pressed', 'true');
  } finally {
    await server.stop();
  }
});

test('decisions: tail, presets, picker, prefix, export and permalink', async ({ page, server }) => {
  await server.exhaust({ api_key: 'tailed-0123456789' });
  await open(page, server, 'decisions');
  await page.getByLabel('API key').fill('TAIL*');
  await page.getByLabel('Time').selectOption('last 5 min');
  await expect(page).toHaveURL(/key=TAIL\*.*last=5m|key=TAIL%2A.*last=5m/);
  const rows = page.getByRole('row').filter({ hasText: 'tail…' });
  await expect(rows.first()).toBeVisible();
  await expect(page.getByRole('row').filter({ hasText: 'api_key' }).filter({ hasNotText: 'tail…' }), 'only what begins so').toHaveCount(0);
  expect(await page.locator('datalist#rules option').evaluateAll((all) => all.map((one) => (one as HTMLOptionElement).value))).toContain('per-key');
  const before = await rows.count();

  await page.getByRole('button', { name: 'Live tail' }).click();
  expect(await server.check({ api_key: 'tailed-0123456789' })).toBe(false);
  await expect(rows, 'new ones come by themselves').toHaveCount(before + 1);

  for (const [name, begins] of [['NDJSON', '{'], ['CSV', 'at,id,verdict']] as const) {
    const exported = await (await fetch(server.admin + (await page.getByRole('link', { name }).getAttribute('href')))).text();
    expect(exported.startsWith(begins), exported.slice(0, 80)).toBe(true);
    expect(exported).toContain('tail…');
    expect(exported).not.toContain('0123456789"');
  }
  await page.getByRole('button', { name: 'Live tail' }).click();
  await rows.first().getByRole('button', { name: /^Explain decision/ }).click();
  await expect(page).toHaveURL(/why=[0-9a-f]{32}/);
  const why = new URLSearchParams(page.url().split('?')[1]).get('why') ?? '';
  await page.goto('about:blank');
  await page.goto(`${server.admin}/#/decisions?why=${why}`);
  await expect(page.getByRole('dialog', { name: 'Decision explained' })).toContainText(why);
  await page.keyboard.press('Escape');
  await expect(page).not.toHaveURL(/why=/);
});

test('the audit log is filtered, in the address', async ({ page, server }) => {
  await server.ask('PUT', '/admin/v1/quotas/sought-0123456789', { tier: 'pro', reason: 'sought ticket' });
  await server.ask('POST', '/admin/v1/emergency', { action: 'tighten', target: { kind: 'tenant', value: 'sought' }, factor: 0.5, reason: 'sought incident', ttl_seconds: 60 });
  await open(page, server, 'audit');
  await expect(page.getByRole('row').filter({ hasText: 'sought incident' })).toBeVisible();
  await page.getByLabel('Action').fill('quota');
  await page.getByRole('button', { name: 'Filter' }).click();
  await expect(page).toHaveURL(/#\/audit\?action=quota$/);
  await expect(page.getByRole('row').filter({ hasText: 'sought incident' })).toHaveCount(0);
  await expect(page.getByRole('row').filter({ hasText: 'sought ticket' })).toBeVisible();
  await page.reload();
  await expect(page.getByLabel('Action')).toHaveValue('quota');
  await page.getByLabel('Actor').fill('nobody');
  await page.getByRole('button', { name: 'Filter' }).click();
  await expect(page.getByText('No matching changes')).toBeVisible();
  await page.getByRole('button', { name: 'Clear' }).click();
  await expect(page.getByRole('row').filter({ hasText: 'sought incident' })).toBeVisible();
  for (const one of await server.emergencies()) await server.ask('DELETE', `/admin/v1/emergency/${one.id}`);
});

test('tokens are created, shown once, and revoked', async ({ page }) => {
  const server = await new Server('tokens').start();
  try {
    await open(page, server, 'tokens');
    await expect(page.getByText('No token exists yet')).toBeVisible();
    await page.getByRole('button', { name: 'Create token…' }).click();
    await page.getByLabel('Name of the owner').fill('vera');
    await page.getByLabel('Role').selectOption('admin');
    await page.getByRole('button', { name: 'Create', exact: true }).click();
    const secret = (await page.getByTestId('token').textContent()) ?? '';
    expect(secret).toMatch(/^tg_[0-9a-f]{16}_/);
    await page.getByRole('button', { name: 'Done' }).click();
    // The first token ends the access without one.
    await page.getByLabel('Token').fill(secret);
    await page.keyboard.press('Enter');
    const row = (name: string) => page.getByRole('row').filter({ hasText: name });
    await expect(row('vera')).toContainText('admin');
    await page.getByRole('button', { name: 'Create token…' }).click();
    await page.getByLabel('Name of the owner').fill('otto');
    await page.getByLabel('Valid for').selectOption('30 days');
    await page.getByRole('button', { name: 'Create', exact: true }).click();
    const other = (await page.getByTestId('token').textContent()) ?? '';
    await page.getByRole('button', { name: 'Done' }).click();
    await expect(row('otto')).toContainText('viewer');
    await expect(page.locator('body'), 'shown once').not.toContainText(other);
    const ask = async () => (await fetch(`${server.admin}/admin/v1/stats`, { headers: { authorization: `Bearer ${other}` } })).status;
    expect(await ask()).toBe(200);
    await page.getByRole('button', { name: 'Revoke the token of otto' }).click();
    await page.getByRole('dialog').getByRole('button', { name: 'Revoke' }).click();
    await expect(row('otto')).toHaveCount(0);
    expect(await ask()).toBe(401);
    await page.getByLabel('Show 1 revoked or expired').check();
    await expect(row('otto')).toContainText('revoked');
  } finally {
    await server.stop();
  }
});

test('the editor completes keys and values, and adds a file with its domain', async ({ page }) => {
  const server = await new Server('completed').start();
  try {
    await open(page, server, 'rules?tab=edit');
    const area = page.getByRole('textbox', { name: 'Rule file rules.yaml' });
    const list = page.getByRole('listbox', { name: 'Completions' });
    await expect(page.getByText('All keys')).toBeVisible();
    await area.click();
    await page.keyboard.press('Control+End');
    await page.keyboard.type('    al');
    await expect(list.getByRole('option')).toHaveText([/^algorithm/]);
    await page.keyboard.press('Tab');
    // The values of the key follow.
    await expect(list.getByRole('option').filter({ hasText: 'sliding_log' })).toBeVisible();
    await page.keyboard.type('sl');
    await page.keyboard.press('ArrowDown');
    await page.keyboard.press('ArrowDown');
    await page.keyboard.press('Enter');
    await expect(area).toHaveValue(/\n    algorithm: sliding_log$/);
    await expect(list).toHaveCount(0);
    await page.keyboard.press('Enter');
    await expect(area, 'without a list, Enter is Enter').toHaveValue(/sliding_log\n    $/);

    await page.getByRole('button', { name: 'Add file…' }).click();
    await page.getByLabel('File name').fill('rules.yaml');
    await page.getByLabel('Domain').fill('billing');
    await page.getByRole('button', { name: 'Add', exact: true }).click();
    await expect(page.getByRole('alert')).toHaveText('A file of this name exists.');
    await page.getByLabel('File name').fill('billing.yaml');
    await page.getByRole('button', { name: 'Add', exact: true }).click();
    await expect(page.getByRole('textbox', { name: 'Rule file billing.yaml' })).toHaveValue(/^domain: billing\n/);
    await expect(page.getByText(/^no errors/)).toBeVisible();
    await page.getByRole('button', { name: 'Publish…' }).click();
    await page.getByLabel('Reason').fill('ticket 9');
    await page.getByRole('dialog').getByRole('button', { name: 'Publish', exact: true }).click();
    await expect(page.getByText(/Revision \d+ is active/)).toBeVisible();
    expect(await server.check({ api_key: 'billed-0123456789' }, 'billing')).toBe(true);
    await open(page, server, 'rules');
    await expect(page.getByRole('heading', { name: 'Domain billing' })).toBeVisible();
  } finally {
    await server.stop();
  }
});
