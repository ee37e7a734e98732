// What operators do on the page, seen in what the server then decides.
import { choose, expect, open, RULES, Server, test } from './server';

test('a denied caller is listed, explained and given an override', async ({ page, server }) => {
  const key = 'override-me-0123456789';
  await server.exhaust({ api_key: key });
  await open(page, server, 'overview');
  const row = page.getByRole('row').filter({ hasText: 'per-key' }).filter({ hasText: 'overr…' }).first();
  await expect(row).toBeVisible();

  // A later request of the same caller may have passed, and is no answer to why one was denied.
  const asked = page.waitForRequest(/admin\/v1\/decisions\?/);
  await choose(page, row, 'Explain denial');
  expect(new URL((await asked).url()).searchParams.get('verdict')).toBe('deny');
  const dialog = page.getByRole('dialog');
  await expect(dialog.getByText('Denied by rule per-key.')).toBeVisible();
  await expect(dialog.getByText('per-key').first()).toBeVisible();
  await expect(dialog, 'no page shows a whole key').not.toContainText(key);
  await page.keyboard.press('Escape');

  // One click: nobody has to know the key.
  await choose(page, row, 'Usage');
  await expect(dialog.getByRole('row').filter({ hasText: 'per-key' })).toContainText('5 / 1h');
  await page.keyboard.press('Escape');

  await choose(page, row, 'Override limit…');
  await expect(dialog.getByRole('heading', { level: 2 }), 'the dialog names its caller').toHaveText(/^Override limit of overr…/);
  await expect(dialog.getByLabel('API key')).toHaveCount(0);
  await dialog.getByLabel('Requests').fill('50');
  // The rule's own period: one of another period would hold beside it.
  await dialog.getByLabel('Per', { exact: true }).fill('hour');
  await dialog.getByLabel('Reason').fill('ticket 12');
  await expect(dialog.getByLabel('Expires'), 'it ends by itself').not.toHaveValue('');
  await dialog.getByRole('button', { name: 'Save', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await server.check({ api_key: key }), 'it acts').toBe(true);

  await open(page, server, 'quotas');
  await expect(page.getByRole('row').filter({ hasText: 'ticket 12' })).toContainText('50 / hour');
  await page.getByLabel('API key (exact)').fill(key);
  await page.getByRole('button', { name: 'Find' }).click();
  await page.getByRole('button', { name: 'Usage' }).click();
  await expect(dialog.getByRole('row').filter({ hasText: 'per-key' })).toContainText('override');
  await page.keyboard.press('Escape');
  await page.getByRole('button', { name: 'Delete…' }).click();
  await dialog.getByLabel('Reason').fill('ticket 12 is closed');
  await dialog.getByRole('button', { name: 'Delete', exact: true }).click();
  // The caller uses more than the rules allow it.
  await dialog.getByRole('checkbox').check();
  await dialog.getByRole('button', { name: 'Delete', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  // Other tests have quotas of their own on this server.
  await expect(page.getByRole('row').filter({ hasText: 'overr…' })).toHaveCount(0);
  expect(await server.check({ api_key: key }), 'the rules act alone again').toBe(false);

  await open(page, server, 'audit');
  await expect(page.getByRole('row').filter({ hasText: 'quota.delete' }).first()).toContainText('ticket 12 is closed');
});

test('a denial is found in the log and explained', async ({ page, server }) => {
  await server.exhaust({ api_key: 'look-me-up-0123456789', endpoint: 'POST /login' });
  await open(page, server, 'decisions');
  await page.getByLabel('Verdict').selectOption('denied');
  await page.getByLabel('Rule').fill('logins');
  await page.getByRole('button', { name: 'Search' }).click();
  await expect(page.getByRole('row').nth(1)).toContainText('logins');
  await page.getByRole('button', { name: /^Explain decision/ }).first().click();
  await expect(page.getByRole('dialog')).toContainText('logins');
});

test('quotas are imported from a file, and invalid lines are reported', async ({ page, server }) => {
  await open(page, server, 'quotas');
  await page.getByRole('button', { name: 'Import…' }).click();
  const lines = ['{"api_key":"imported-0123456789","tier":"pro","reason":"a file"}', '{"api_key":"imported-2","tier":7}'];
  await page.getByLabel('File').setInputFiles({ name: 'quotas.ndjson', mimeType: 'application/x-ndjson', buffer: Buffer.from(lines.join('\n')) });
  await page.getByRole('dialog').getByRole('button', { name: 'Import' }).click();
  await expect(page.getByRole('dialog')).toContainText('1 imported, 1 rejected.');
  await expect(page.getByRole('dialog').getByRole('row').filter({ hasText: 'tier' })).toContainText('2');
  await page.keyboard.press('Escape');
  await expect(page.getByRole('row').filter({ hasText: 'a file' })).toBeVisible();
  for (let i = 0; i < 20; i++) expect(await server.check({ api_key: 'imported-0123456789' })).toBe(true);
});

test('rules are corrected, published and rolled back', async ({ page }) => {
  const server = await new Server().start();
  try {
    await open(page, server, 'rules');
    const row = page.getByRole('row').filter({ hasText: 'per-key' });
    await expect(row).toContainText('5/1h');
    await row.getByRole('button').click();
    const text = page.getByRole('textbox', { name: /^Rule file/ });
    await expect(text, 'the line is shown').toBeFocused();

    await text.fill(RULES.replace('limit: 5/hour', 'lmit: 5/hour'));
    const error = page.getByRole('button', { name: /^Error/ }).first();
    await expect(error).toContainText('line 6');
    await error.click();
    await expect(text).toBeFocused();
    const line = await text.evaluate((area: HTMLTextAreaElement) => area.value.slice(0, area.selectionStart).split('\n').length);
    expect(line, 'an error leads to its line').toBe(6);
    await expect(page.getByRole('button', { name: 'Publish…' })).toBeDisabled();

    await text.fill(RULES.replace('limit: 5/hour', 'limit: 7/hour'));
    await expect(page.getByText('no errors')).toBeVisible();
    await page.getByRole('button', { name: 'Publish…' }).click();
    const dialog = page.getByRole('dialog');
    await dialog.getByLabel('Reason').fill('ticket 13');
    await dialog.getByRole('button', { name: 'Publish', exact: true }).click();
    await expect(dialog).toHaveCount(0);
    await expect.poll(() => passes(server, 'first'), { message: 'they act' }).toBe(7);

    await expect(page.getByText('The rule files of this node are ignored'), 'the file has the former limit').toContainText('differ from it in 1 rule');

    await page.getByRole('tab', { name: 'Revisions' }).click();
    await expect(page.getByRole('row').filter({ hasText: 'ticket 13' })).toContainText('active');
    await page.getByRole('button', { name: 'Compare revision 1 with the active rules' }).click();
    await expect(dialog.getByRole('row').filter({ hasText: 'removed' })).toContainText('limit: 7/hour');
    await page.keyboard.press('Escape');
    await page.getByRole('button', { name: 'Roll back to revision 1' }).click();
    await dialog.getByLabel('Reason').fill('too generous');
    await dialog.getByRole('button', { name: 'Roll back' }).click();
    await expect(page.getByRole('row').filter({ hasText: 'active' })).toContainText('too generous');
    await expect.poll(() => passes(server, 'second'), { message: 'the old ones act again' }).toBe(5);
  } finally {
    await server.stop();
  }
});

test('a measure takes effect, counts down and ends', async ({ page, server }) => {
  const key = 'block-me-0123456789';
  expect(await server.check({ api_key: key })).toBe(true);
  await open(page, server, 'emergency');
  await page.getByLabel('Target API key').fill(key);
  await page.getByLabel('Duration (min)').fill('5');
  await page.getByLabel('Reason').fill('incident 7');
  await page.getByRole('button', { name: 'Apply now' }).click();
  const left = page.getByRole('timer');
  await expect(left).toHaveText(/^[45]:\d\d$/);
  const first = await left.textContent();
  await expect(left, 'it counts down').not.toHaveText(first ?? '');
  expect(await server.check({ api_key: key }), 'it acts').toBe(false);
  await open(page, server, 'overview');
  await expect(page.getByText('incident 7'), 'every view says so').toBeVisible();
  await open(page, server, 'emergency');
  await page.getByRole('button', { name: 'Extend' }).click();
  await page.getByRole('button', { name: 'End…' }).click();
  await page.getByRole('dialog').getByLabel('Reason').fill('incident 7 is over');
  await page.getByRole('button', { name: 'End measure' }).click();
  await expect(page.getByText('No active measures')).toBeVisible();
  expect(await server.check({ api_key: key }), 'it has ended').toBe(true);
});

test('a measure stays in sight while the server cannot list measures', async ({ page, server }) => {
  await server.ask('POST', '/admin/v1/emergency', { action: 'shadow_all', target: { kind: 'all' }, reason: 'incident 9' });
  try {
    await open(page, server, 'overview');
    await expect(page.getByText('incident 9')).toBeVisible();
    await expect(page.getByText('may be out of date')).toHaveCount(0);
    await page.route('**/admin/v1/emergency', (route) => route.fulfill({ status: 503, contentType: 'application/problem+json', body: '{"title":"Database unavailable","detail":"try again"}' }));
    // Asked for again by itself.
    await expect(page.getByText('may be out of date')).toBeVisible({ timeout: 20_000 });
    await expect(page.getByText('incident 9')).toBeVisible();
    await page.goto(`${server.admin}/#/emergency`);
    await expect(page.getByRole('heading', { name: 'Active measures (last known)' })).toBeVisible();
    await expect(page.getByText('incident 9')).toBeVisible();
    await page.unroute('**/admin/v1/emergency');
    await page.getByRole('button', { name: 'Try again' }).click();
    await expect(page.getByRole('heading', { name: 'Active measures', exact: true })).toBeVisible();
  } finally {
    for (const { id } of await server.emergencies()) await server.ask('DELETE', `/admin/v1/emergency/${id}`);
  }
});

test('a scheduled quota says what applies until then', async ({ page, server }) => {
  const key = 'later-0123456789';
  const limit = { descriptor: 'default', requests_per_unit: 70, unit: 'minute' };
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', overrides: [limit], reason: 'ticket 31' });
  const later = new Date(Date.now() + 86_400_000).toISOString();
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { overrides: [{ ...limit, requests_per_unit: 90 }], effective_at: later, reason: 'ticket 32' });
  await open(page, server, 'quotas');
  const row = page.getByRole('row').filter({ hasText: 'ticket 32' });
  await expect(row).toContainText('the current quota applies: tier pro; default 70 / minute.');
  await choose(page, row, 'Edit…');
  await expect(page.getByRole('dialog')).toContainText('the current quota applies: tier pro; default 70 / minute.');
  await page.keyboard.press('Escape');
  await server.ask('DELETE', `/admin/v1/quotas/${key}`);
});

test('what is done at another node is seen here, and both are listed', async ({ page }) => {
  const here = await new Server('node-here').start();
  const there = await new Server('node-there', here).start();
  try {
    await open(page, here, 'quotas');
    await expect(page.getByText('No quotas yet')).toBeVisible();
    await there.ask('PUT', '/admin/v1/quotas/from-elsewhere-0123456789', { tier: 'pro', reason: 'ticket 21' });
    await expect(page.getByRole('row').filter({ hasText: 'ticket 21' })).toBeVisible();
    await there.ask('POST', '/admin/v1/emergency', { action: 'shadow_all', target: { kind: 'all' }, reason: 'incident 22' });
    await expect(page.getByText('incident 22'), 'every view says so').toBeVisible();

    await page.goto(`${here.admin}/#/rules?tab=history`);
    await expect(page.getByRole('heading', { level: 1 })).toBeVisible();
    const files = [{ name: 'rules.yaml', text: RULES.replace('limit: 5/hour', 'limit: 9/hour') }];
    await there.ask('POST', '/admin/v1/rules', { files, reason: 'ticket 23' });
    await expect(page.getByRole('row').filter({ hasText: 'ticket 23' })).toContainText('active');

    await page.goto(`${here.admin}/#/overview`);
    const row = (name: string) => page.getByRole('row').filter({ hasText: name });
    await expect(row('node-here')).toContainText('this node');
    await expect(row('node-there')).toContainText('eu-west-1');
    await expect(row('node-there'), 'the same rules').not.toContainText('different rules');
    await there.stop();
    await expect(row('node-there'), 'it has taken its leave').toHaveCount(0);
  } finally {
    await there.stop();
    await here.stop();
  }
});

let turn = 0;
/** How many requests of a new caller pass. */
async function passes(server: Server, name: string): Promise<number> {
  const key = `${name}-${turn++}-0123456789`;
  for (let i = 0; i < 50; i++) if (!(await server.check({ api_key: key }))) return i;
  return 50;
}

test('what changed while nobody could listen is seen', async ({ page }) => {
  const server = await new Server('restarted').start();
  try {
    await open(page, server, 'quotas');
    await expect(page.getByText('No quotas yet')).toBeVisible();
    await expect(page.getByText('live', { exact: true })).toBeVisible();
    await server.restart();
    await server.ask('PUT', '/admin/v1/quotas/restarted-4242424242', { tier: 'pro', reason: 'a restart' });
    await expect(page.getByRole('row').filter({ hasText: 'restar' })).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('a key that is searched for does not get into the address', async ({ page, server }) => {
  await open(page, server, 'decisions');
  const key = page.getByLabel('API key');
  await key.fill('sk_live_4242424242424242');
  await page.getByLabel('Rule').fill('per-key');
  await page.getByRole('button', { name: 'Search' }).click();
  await expect(page).toHaveURL(/#\/decisions\?rule=per-key$/);
  await key.fill('0123456789abcdef');
  await page.getByRole('button', { name: 'Search' }).click();
  await expect(page).toHaveURL(/key=0123456789abcdef/);
});

test('a user has a quota as an API key has', async ({ page }) => {
  const server = await new Server('users').start('domain: sample\ndescriptors:\n  - {key: user_id, name: per-user, limit: 1/hour, tiers: {pro: 5/hour}}\n');
  try {
    expect(await server.check({ user_id: 'u-17' })).toBe(true);
    expect(await server.check({ user_id: 'u-17' })).toBe(false);
    await open(page, server, 'quotas');
    await page.getByRole('button', { name: 'Set quota…' }).click();
    const dialog = page.getByRole('dialog');
    await dialog.getByLabel('Identified by').fill('user_id');
    await dialog.getByLabel('Value').fill('u-17');
    await dialog.getByLabel('Tier').fill('pro');
    await dialog.getByLabel('Reason').fill('ticket 17');
    await dialog.getByRole('button', { name: 'Save', exact: true }).click();
    await expect(dialog).toHaveCount(0);
    await expect(page.getByRole('row').filter({ hasText: 'ticket 17' })).toContainText('user_id=');
    expect(await server.check({ user_id: 'u-17' }), 'it acts').toBe(true);
    expect(await server.check({ user_id: 'u-18' })).toBe(true);
    expect(await server.check({ user_id: 'u-18' }), 'for this user alone').toBe(false);

    await page.getByLabel('Identified by').fill('user_id');
    await page.getByLabel('Value (exact)').fill('u-17');
    await page.getByRole('button', { name: 'Find' }).click();
    await page.getByRole('button', { name: 'Usage' }).click();
    await expect(dialog.getByRole('row').filter({ hasText: 'per-user' })).toContainText('5 / 1h');
  } finally {
    await server.stop();
  }
});
