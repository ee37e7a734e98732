// A request is explained before it is made: which rules match, what the counters hold, what would happen; live and on a draft.
import { expect, open, test } from './server';
import type { Page } from '@playwright/test';

const KEY = 'explain-0123456789';

async function enter(page: Page, attributes: Record<string, string>): Promise<void> {
  for (const [name, value] of Object.entries(attributes)) await page.getByLabel(`Value of ${name}`).fill(value);
  await page.getByRole('button', { name: 'Explain' }).click();
}

test('a request is explained by the active rules, and nothing is charged', async ({ page, server }) => {
  for (let i = 0; i < 2; i++) await server.check({ api_key: KEY, endpoint: 'POST /login' });
  await open(page, server, 'explain');
  await enter(page, { api_key: KEY, endpoint: 'POST /login' });
  const outcome = page.getByRole('region', { name: 'Outcome' });
  await expect(outcome).toContainText('It would be denied by `logins`');
  await expect(outcome).toContainText('2 of 3 rules match');
  const perKey = page.getByRole('region', { name: 'Rule per-key' });
  for (let i = 0; i < 3; i++) {
    await expect(perKey).toContainText('2 of 5 used, 3 left');
    await expect(perKey).toContainText('1 fits');
    await page.getByRole('button', { name: 'Explain' }).click();
  }
  await expect(page.getByRole('region', { name: 'Rule logins' })).toContainText('denies 1 for');
  await page.getByText('1 rule does not match').click();
  await expect(page.getByText('the request has no `remote_address`')).toBeVisible();
  expect(page.url(), 'a key is not in the address').not.toContain(KEY);
  expect(decodeURIComponent(page.url().replaceAll('+', ' '))).toContain('attr.endpoint=POST /login');

  // An emergency measure and a quota of this caller are seen.
  await server.ask('PUT', `/admin/v1/quotas/${KEY}`, { tier: 'pro', reason: 'ticket' });
  await expect(async () => {
    await page.getByRole('button', { name: 'Explain' }).click();
    await expect(outcome).toContainText('tier pro of the quota', { timeout: 1_000 });
  }).toPass();
  await expect(perKey).toContainText('by the tier');
});

test('a shared address is explained at once', async ({ page, server }) => {
  await open(page, server, 'explain?attr.remote_address=192.0.2.9&cost=31');
  await expect(page.getByRole('region', { name: 'Outcome' })).toContainText('It would be denied by `per-network`; it can never pass');
  await expect(page.getByLabel('Cost')).toHaveValue('31');
});

test('an HTTP request is explained as it arrives', async ({ page, server }) => {
  await open(page, server, 'explain');
  await page.getByRole('radio', { name: /^HTTP request/ }).check();
  await page.getByLabel('Method').fill('POST');
  await page.getByLabel('Path').fill('/login?next=%2F');
  await page.getByLabel('Address of the client').fill('192.0.2.33');
  await page.getByLabel('Header fields').fill('X-API-Key: head-0123456789\nAccept: */*');
  await page.getByRole('button', { name: 'Explain' }).click();
  const outcome = page.getByRole('region', { name: 'Outcome' });
  await expect(outcome).toContainText('3 of 3 rules match');
  await expect(outcome).toContainText('endpoint POST /login');
  await expect(outcome).not.toContainText('head-0123456789');
  expect(page.url()).not.toContain('head-0123456789');
  await page.getByLabel('Address of the client').fill('nowhere');
  await page.getByRole('button', { name: 'Explain' }).click();
  await expect(page.getByRole('alert')).toContainText('invalid address');
});

test('the draft in the editor is explained beside the active rules', async ({ page, server }) => {
  await open(page, server, 'explain');
  await expect(page.getByRole('radio', { name: 'Draft' })).toBeDisabled();
  await open(page, server, 'rules?tab=edit');
  const text = page.getByRole('textbox', { name: /^Rule file/ });
  await expect(text).toBeVisible();
  await text.fill((await text.inputValue()).replace('limit: 30/minute', 'limit: 50/minute'));
  await page.getByRole('navigation').getByRole('link', { name: 'Explain' }).click();
  await page.getByLabel('Name of attribute 1').fill('remote_address');
  await page.getByLabel('Value of remote_address').fill('192.0.2.77');
  await page.getByLabel('Cost').fill('40');
  await page.getByRole('radio', { name: 'Draft' }).check();
  await page.getByRole('button', { name: 'Explain' }).click();
  const outcome = page.getByRole('region', { name: 'Outcome' });
  await expect(outcome).toContainText('It would be allowed.');
  await expect(outcome).toContainText('By the active rules: denied It would be denied by `per-network`; it can never pass');
  await expect(outcome.getByRole('listitem')).toHaveText(/per-network: .*30\/1m.* → .*50\/1m/);
  await page.getByRole('radio', { name: 'Active' }).check();
  await expect(outcome).toContainText('It would be denied by `per-network`');
  await expect(outcome.getByRole('listitem')).toHaveCount(0);
});

test.describe('on a phone', () => {
  test.use({ viewport: { width: 390, height: 844 }, hasTouch: true });

  test('the explanation fits', async ({ page, server }) => {
    await open(page, server, 'explain');
    await enter(page, { api_key: 'a-rather-long-key-0123456789-0123456789-0123456789', endpoint: 'POST /login' });
    await expect(page.getByRole('region', { name: 'Outcome' })).toContainText('It would be allowed');
    await page.getByText('1 rule does not match').click();
    expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
  });
});
