// Forms that must not lose, shorten or move what an operator has set or written.
import type { Page } from '@playwright/test';
import { choose, expect, open, RULES, Server, test } from './server';

interface Quota {
  tier: string | null;
  overrides: { descriptor: string; requests_per_unit: number; unit: string; burst?: number }[];
  expires_at: string | null;
  reason: string;
}

/** What the admin address tells, as another person would read it. */
async function fetchJson<T>(server: Server, path: string): Promise<T> {
  const answer = await fetch(server.admin + path);
  expect(answer.ok, `${path}: ${answer.status}`).toBe(true);
  return (await answer.json()) as T;
}
const quotaOf = (server: Server, key: string) => fetchJson<Quota>(server, `/admin/v1/quotas/${key}`);

/** Warnings of the page's own framework: each is a mistake in the page. */
function warnings(page: Page): string[] {
  const heard: string[] = [];
  page.on('console', (message) => {
    if (message.type() === 'warning') heard.push(message.text());
  });
  return heard;
}

test('an existing quota is never replaced unseen', async ({ page, server }) => {
  const heard = warnings(page);
  const key = 'agreed-already-0123456789';
  const limit = { descriptor: 'default', requests_per_unit: 70, unit: 'minute' };
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', overrides: [limit], reason: 'ticket 1' });
  await open(page, server, 'quotas');
  await page.getByRole('button', { name: 'Set quota…' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('Tier').fill('free');
  await dialog.getByLabel('Reason').fill('ticket 2');
  // The key last, and Enter: the current quota has not been shown.
  await dialog.getByLabel('API key').fill(key);
  await page.keyboard.press('Enter');
  await expect(dialog.getByRole('status')).toContainText('This caller already has a quota: tier pro; default 70 / minute (ticket 1).');
  await expect(dialog.getByLabel('Tier'), 'what was written stays').toHaveValue('free');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 2');
  await expect(dialog.getByLabel('Requests'), 'what was not written is as agreed').toHaveValue('70');
  expect(await quotaOf(server, key), 'nothing is saved before it was seen').toMatchObject({ tier: 'pro', reason: 'ticket 1' });
  await dialog.getByRole('button', { name: 'Save', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await quotaOf(server, key)).toMatchObject({ tier: 'free', reason: 'ticket 2', overrides: [limit] });

  // Another operator was quicker: their quota is shown before they are replaced.
  await choose(page, page.getByRole('row').filter({ hasText: 'ticket 2' }), 'Edit…');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 2');
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'enterprise', reason: 'ticket 3' });
  await dialog.getByLabel('Reason').fill('ticket 4');
  await dialog.getByRole('button', { name: 'Save', exact: true }).click();
  await expect(dialog.getByRole('alert')).toBeVisible();
  await dialog.getByRole('button', { name: 'Save', exact: true }).click();
  await expect(dialog.getByRole('status')).toContainText('tier enterprise (ticket 3)');
  await expect(dialog.getByLabel('Tier')).toHaveValue('enterprise');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 4');
  await page.keyboard.press('Escape');
  await expect(dialog).toHaveCount(0);
  await server.ask('DELETE', `/admin/v1/quotas/${key}`);
  expect(heard).toEqual([]);
});

test('values of one key are not offered for another', async ({ page, server }) => {
  const [first, second] = ['first-key-0123456789', 'second-key-0123456789'];
  await server.ask('PUT', `/admin/v1/quotas/${first}`, { tier: 'pro', expires_at: '2099-01-02T10:20:45Z', reason: 'ticket 5' });
  await open(page, server, 'quotas');
  await page.getByRole('button', { name: 'Set quota…' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('API key').fill(first);
  await dialog.getByLabel('Tier').focus();
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 5');
  await dialog.getByLabel('API key').fill(second);
  await page.keyboard.press('Enter');
  await expect(dialog.getByRole('status')).toContainText('This key has no quota.');
  for (const name of ['Tier', 'Expires', 'Reason']) await expect(dialog.getByLabel(name)).toHaveValue('');
  await dialog.getByLabel('Tier').fill('pro');
  await dialog.getByLabel('Reason').fill('ticket 6');
  await dialog.getByRole('button', { name: 'Save', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await quotaOf(server, second)).toMatchObject({ tier: 'pro', expires_at: null, reason: 'ticket 6' });
  for (const key of [first, second]) await server.ask('DELETE', `/admin/v1/quotas/${key}`);
});

test('editing the reason alone does not move the expiry', async ({ page, server }) => {
  const key = 'to-the-second-0123456789';
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', expires_at: '2099-01-02T10:20:45Z', reason: 'ticket 7' });
  await open(page, server, 'quotas');
  await choose(page, page.getByRole('row').filter({ hasText: 'ticket 7' }), 'Edit…');
  const dialog = page.getByRole('dialog');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 7');
  await dialog.getByLabel('Reason').fill('ticket 8');
  await dialog.getByRole('button', { name: 'Save', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await quotaOf(server, key)).toMatchObject({ expires_at: '2099-01-02T10:20:45Z', reason: 'ticket 8' });
  await server.ask('DELETE', `/admin/v1/quotas/${key}`);
});

test('an override starts above the current limit, and names it', async ({ page }) => {
  const server = await new Server().start(RULES.replace('limit: 5/hour', 'limit: 200/second\n    burst: 300'));
  try {
    const key = 'wants-more-0123456789';
    const row = page.getByRole('row').filter({ hasText: 'logins' }).first();
    await server.exhaust({ api_key: key, endpoint: 'POST /login' });
    await open(page, server, 'overview');
    await choose(page, row, 'Override limit…');
    const dialog = page.getByRole('dialog');
    // A rule that counts more than the key, which usage alone does not know.
    await expect(dialog).toContainText('logins currently allows 2 / 1h.');
    await expect(dialog.getByLabel('Requests')).toHaveValue('4');
    await expect(dialog.getByLabel('Per', { exact: true })).toHaveValue('hour');
    await dialog.getByRole('button', { name: 'Remove override 1' }).click();
    await expect(dialog.getByLabel('Requests'), 'what was taken out stays out').toHaveCount(0);
    await page.keyboard.press('Escape');

    // By the counters, where no denial is in the log.
    await server.ask('POST', '/admin/v1/emergency', { action: 'block', target: { kind: 'api_key', value: 'blocked-0123456789' }, reason: 'incident 1' });
    await expect.poll(() => server.check({ api_key: 'blocked-0123456789' })).toBe(false);
    const blocked = page.getByRole('region', { name: 'Top denied callers' }).getByRole('row').filter({ hasText: 'bloc…' });
    await choose(page, blocked, 'Set quota…');
    await expect(dialog.getByRole('heading', { level: 2 })).toHaveText(/^Set quota for bloc…/);
    await expect(dialog).toContainText('per-key currently allows 200 / 1s, burst 300.');
    await expect(dialog.getByLabel('Requests')).toHaveValue('400');
    await expect(dialog.getByLabel('Burst')).toHaveValue('600');
    await expect(dialog.getByLabel('Per', { exact: true })).toHaveValue('second');
    await dialog.getByLabel('Reason').fill('ticket 9');
    await dialog.getByRole('button', { name: 'Save', exact: true }).click();
    await expect(dialog).toHaveCount(0);
    expect(await quotaOf(server, 'blocked-0123456789')).toMatchObject({ overrides: [{ descriptor: 'default', requests_per_unit: 400, unit: 'second', burst: 600 }] });
  } finally {
    await server.stop();
  }
});

test('a blocked caller is not offered an override that would change nothing', async ({ page }) => {
  const server = await new Server().start();
  try {
    const key = 'by-hand-0123456789';
    await server.ask('POST', '/admin/v1/emergency', { action: 'block', target: { kind: 'api_key', value: key }, reason: 'incident 3' });
    await expect.poll(() => server.check({ api_key: key })).toBe(false);
    await open(page, server, 'decisions?verdict=deny');
    await page.getByRole('row').filter({ hasText: 'Denied by emergency measure' }).first().getByRole('button', { name: /^Explain decision/ }).click();
    const dialog = page.getByRole('dialog');
    await expect(dialog).toContainText('An emergency measure overrides all limits');
    await expect(dialog.getByRole('button', { name: /Override this caller/ })).toHaveCount(0);
    await dialog.getByRole('link', { name: 'View measures' }).click();
    await expect(page.getByRole('heading', { level: 1, name: 'Emergency' })).toBeVisible();
    await expect(page.getByText('incident 3')).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('extending a measure never shortens it', async ({ page, server }) => {
  await server.ask('POST', '/admin/v1/emergency', { action: 'block', target: { kind: 'api_key', value: 'a-day-0123456789' }, reason: 'incident 2', ttl_seconds: 86_400 });
  const [before] = await fetchJson<{ active: { id: string; expires_at: string }[] }>(server, '/admin/v1/emergency').then((list) => list.active);
  await open(page, server, 'emergency');
  await expect(page.getByRole('timer')).toHaveText(/^(24:00:00|23:59:\d\d)$/);
  await page.getByRole('button', { name: 'Extend' }).click();
  await expect(page.getByText('Extended; expires in 1 d')).toBeVisible();
  await expect(page.getByRole('timer')).toHaveText(/^(24:00:00|23:59:\d\d)$/);
  const [after] = await fetchJson<{ active: { id: string; expires_at: string }[] }>(server, '/admin/v1/emergency').then((list) => list.active);
  expect(new Date(after?.expires_at ?? 0).getTime()).toBeGreaterThanOrEqual(new Date(before?.expires_at ?? 0).getTime());
  await server.ask('DELETE', `/admin/v1/emergency/${after?.id}`);
});

test('what takes something from a caller is confirmed first', async ({ page, server }) => {
  const key = 'cut-off-0123456789';
  await open(page, server, 'quotas');
  await page.getByRole('button', { name: 'Set quota…' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('API key').fill(key);
  await dialog.getByRole('button', { name: 'Add override' }).click();
  await dialog.getByLabel('Requests').fill('0');
  await dialog.getByLabel('Per').fill('hour');
  await dialog.getByLabel('Reason').fill('ticket 9');
  const save = dialog.getByRole('button', { name: 'Save', exact: true });
  await save.click();
  await expect(dialog.getByRole('alert')).toContainText('would allow this caller nothing');
  await expect(save, 'not by a second click alone').toBeDisabled();
  expect((await fetch(`${server.admin}/admin/v1/quotas/${key}`)).status, 'nothing is saved').toBe(404);
  await dialog.getByRole('checkbox').check();
  await save.click();
  await expect(dialog).toHaveCount(0);
  expect((await quotaOf(server, key)).overrides[0]?.requests_per_unit).toBe(0);
});

test('a protection is removed only after a confirmation that names it', async ({ page }) => {
  const server = await new Server('protected').start();
  try {
    await open(page, server, 'rules?tab=edit');
    await page.getByRole('textbox', { name: /^Rule file/ }).fill(RULES.replace('class: security', 'class: comfort'));
    await page.getByRole('button', { name: 'Publish…' }).click();
    const dialog = page.getByRole('dialog');
    await expect(dialog.getByRole('status')).toContainText('is no longer of class security');
    await dialog.getByLabel('Reason').fill('ticket 10');
    const publish = dialog.getByRole('button', { name: 'Publish', exact: true });
    await publish.click();
    await expect(dialog.getByRole('alert')).toContainText('is no longer of class security');
    await expect(publish, 'not by a second click alone').toBeDisabled();
    await dialog.getByRole('checkbox').check();
    await publish.click();
    await expect(dialog).toHaveCount(0);
  } finally {
    await server.stop();
  }
});
