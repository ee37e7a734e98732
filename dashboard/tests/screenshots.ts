// Pictures for the documentation, taken of the real server while `make demo` drives real traffic against it.
import { spawn } from 'node:child_process';
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { choose, expect, open, Server, test } from './server';

const IMAGES = join(import.meta.dirname, '../../docs/images');
const SAMPLE = readFileSync(join(import.meta.dirname, '../../crates/tollgate/src/sample.yaml'), 'utf8');

test('pictures', async ({ page, browser }) => {
  test.setTimeout(300_000);
  mkdirSync(IMAGES, { recursive: true });
  const server = await new Server().start(SAMPLE);
  const demo = spawn('python3', [join(import.meta.dirname, '../../examples/demo.py'), '--server', server.http.replace('http://', ''), '--seconds', '240'], { stdio: 'inherit' });
  try {
    const reason = { reason: 'ticket 12: launch week' };
    const put = (key: string, body: object) => fetch(`${server.admin}/admin/v1/quotas/${key}`, { method: 'PUT', body: JSON.stringify({ ...reason, ...body }) });
    await put('shop-7f31c0aa91', { tier: 'pro' });
    await put('labs-2b90e1d4c7', { overrides: [{ descriptor: 'default', requests_per_unit: 50, unit: 'second', burst: 80 }], expires_at: new Date(Date.now() + 7 * 86_400_000).toISOString() });

    await page.setViewportSize({ width: 1280, height: 860 });
    await open(page, server, 'overview');
    // There is a curve to look at.
    await expect.poll(async () => ((await (await fetch(`${server.admin}/admin/v1/stats?seconds=300`)).json()) as { series: { allow: number[] } }).series.allow.filter(Boolean).length, { timeout: 200_000, intervals: [2_000] }).toBeGreaterThan(90);
    await expect(page.getByRole('button', { name: /^Actions for/ }).first()).toBeVisible();
    // The pointer rests on a chart, which shows the values of that second.
    const plot = await page.locator('.u-over').first().boundingBox();
    await page.mouse.move((plot?.x ?? 0) + (plot?.width ?? 0) * 0.6, (plot?.y ?? 0) + 60);
    await expect(page.getByTestId('crosshair').first()).toBeVisible();
    await page.screenshot({ path: join(IMAGES, 'overview-light.png') });
    await page.mouse.move(2, 2);
    await page.getByLabel('Theme').selectOption('Dark');
    await page.screenshot({ path: join(IMAGES, 'overview-dark.png') });
    await page.getByLabel('Theme').selectOption('Light');

    await choose(page, page.getByRole('region', { name: 'Top denied callers' }).getByRole('row').nth(1), 'Explain denial');
    await expect(page.getByRole('dialog').getByText('Decision ID')).toBeVisible();
    await page.screenshot({ path: join(IMAGES, 'why.png') });
    await page.keyboard.press('Escape');

    await open(page, server, 'rules?tab=edit');
    const text = page.getByRole('textbox', { name: /^Rule file/ });
    await text.fill(SAMPLE.replace('limit: 10/second', 'limit: 8/second'));
    await expect(page.getByRole('heading', { name: 'Impact preview' })).toBeVisible();
    await page.screenshot({ path: join(IMAGES, 'rules.png') });

    await page.getByRole('button', { name: 'Discard changes' }).click();
    await fetch(`${server.admin}/admin/v1/rules`, { method: 'POST', body: JSON.stringify({ files: [{ name: 'rules.yaml', text: SAMPLE.replace('limit: 10/second', 'limit: 12/second') }], reason: 'ticket 13: more room for free callers', confirm: true }) });
    await open(page, server, 'audit');
    await page.getByRole('button', { name: /^View diff/ }).first().click();
    await expect(page.getByRole('dialog').locator('mark').first()).toBeVisible();
    await page.screenshot({ path: join(IMAGES, 'audit.png') });
    await page.keyboard.press('Escape');

    await open(page, server, 'quotas');
    await expect(page.getByRole('row').filter({ hasText: 'ticket 12' }).first()).toBeVisible();
    await page.screenshot({ path: join(IMAGES, 'quotas.png') });

    const phone = await browser.newPage({ viewport: { width: 390, height: 844 }, colorScheme: 'dark', deviceScaleFactor: 2 });
    await open(phone, server, 'overview');
    await expect(phone.getByText('p999').first()).toBeVisible();
    await phone.screenshot({ path: join(IMAGES, 'phone.png') });
    await phone.close();
  } finally {
    demo.kill();
    await server.stop();
  }
});
