// Writing rules: what is written and not published is never lost, and what is shown of it is of this text.
import { expect, open, RULES, Server, test } from './server';

const written = RULES.replace('limit: 5/hour', 'limit: 6/hour');

test('unpublished rules outlive tabs, views, a reload and a log-in', async ({ page }) => {
  const server = await new Server().start();
  try {
    await server.check({ api_key: 'somebody-0123456789' });
    const token = server.token('olga', 'operator');
    const other = server.token('oleg', 'operator');
    const logIn = async (with_: string) => {
      await page.getByLabel('Token').fill(with_);
      await page.keyboard.press('Enter');
      await expect(page.getByRole('button', { name: 'Log out' })).toBeVisible();
    };
    const asked: string[] = [];
    page.on('dialog', (dialog) => {
      asked.push(dialog.type());
      void dialog.accept();
    });
    await page.goto(`${server.admin}/#/rules?tab=edit`);
    await logIn(token);
    const text = page.getByRole('textbox', { name: /^Rule file/ });
    const edit = page.getByRole('tab', { name: /^Editor/ });
    await expect(text).toHaveValue(RULES);
    await expect(edit).not.toContainText('unpublished');
    await text.fill(written);
    await expect(edit).toContainText('unpublished');

    await page.getByRole('tab', { name: 'Active' }).click();
    await expect(edit, 'it is in sight from the other tabs').toContainText('unpublished');
    await edit.click();
    await expect(text).toHaveValue(written);
    await page.getByRole('link', { name: 'Quotas' }).click();
    await page.getByRole('link', { name: 'Rules' }).click();
    await edit.click();
    await expect(text).toHaveValue(written);
    await expect(page.getByText('Restored unpublished changes from')).toBeVisible();
    expect(asked).toEqual([]);
    await page.reload();
    expect(asked, 'the browser asks').toEqual(['beforeunload']);
    await expect(text).toHaveValue(written);

    await page.getByRole('button', { name: 'Log out' }).click();
    await logIn(other);
    await expect(text, 'another person does not find it').toHaveValue(RULES);
    await expect(edit).not.toContainText('unpublished');
    await page.getByRole('button', { name: 'Log out' }).click();
    await logIn(token);
    await expect(text, 'its writer does').toHaveValue(written);

    // Other rules act by now.
    const files = [{ name: 'rules.yaml', text: RULES.replace('limit: 5/hour', 'limit: 9/hour') }];
    const answer = await fetch(`${server.admin}/admin/v1/rules`, { method: 'POST', headers: { authorization: `Bearer ${other}` }, body: JSON.stringify({ files, reason: 'ticket 1' }) });
    expect(answer.status).toBe(201);
    await expect(page.getByText('The active rules have changed.')).toBeVisible();
    await expect(text).toHaveValue(written);
    await page.reload();
    await expect(page.getByText('The active rules have changed.'), 'after a reload too').toBeVisible();
    await expect(text).toHaveValue(written);
    await page.getByRole('button', { name: 'load the current rules' }).click();
    await expect(text).toHaveValue(files[0]?.text ?? '');
    await expect(edit).not.toContainText('unpublished');
    await page.reload();
    await expect(text, 'what was given up is gone').toHaveValue(files[0]?.text ?? '');
    expect(asked, 'and nothing is asked').toEqual(['beforeunload', 'beforeunload']);
  } finally {
    await server.stop();
  }
});

test('rules that were published are no draft', async ({ page }) => {
  const server = await new Server().start();
  try {
    await open(page, server, 'rules?tab=edit');
    const text = page.getByRole('textbox', { name: /^Rule file/ });
    await text.fill(written);
    await page.getByRole('button', { name: 'Publish…' }).click();
    await page.getByRole('dialog').getByLabel('Reason').fill('ticket 2');
    await page.getByRole('dialog').getByRole('button', { name: 'Publish', exact: true }).click();
    await expect(page.getByRole('dialog')).toHaveCount(0);
    await expect(page.getByRole('tab', { name: 'Editor' })).not.toContainText('unpublished');
    expect(await page.evaluate(() => sessionStorage.length)).toBe(0);
    await page.reload();
    await expect(text).toHaveValue(written);
    await expect(page.getByText('Restored unpublished changes')).toHaveCount(0);
  } finally {
    await server.stop();
  }
});

test('publishing previews the impact of this text, not of an earlier one', async ({ page }) => {
  const server = await new Server().start();
  try {
    for (let caller = 0; caller < 5; caller++) for (let i = 0; i < 4; i++) await server.check({ api_key: `caller-${caller}-0123456789` });
    await open(page, server, 'rules?tab=edit');
    const text = page.getByRole('textbox', { name: /^Rule file/ });
    const dialog = page.getByRole('dialog');
    const publish = dialog.getByRole('button', { name: 'Publish', exact: true });
    await text.fill(RULES.replace('limit: 5/hour', 'limit: 3/hour'));
    await page.getByRole('button', { name: 'Publish…' }).click();
    await dialog.getByLabel('Reason').fill('ticket 3');
    await publish.click();
    await expect(dialog.getByLabel('I have reviewed the impact')).toBeVisible();
    await expect(dialog.getByRole('definition').nth(1)).toHaveText('25%');
    await dialog.getByRole('button', { name: 'Cancel' }).click();

    await text.fill(written);
    await page.getByRole('button', { name: 'Publish…' }).click();
    await expect(dialog.getByRole('definition').nth(1)).toHaveText('0%');
    await expect(dialog.getByLabel('I have reviewed the impact')).toHaveCount(0);
    await publish.click();
    await expect(dialog).toHaveCount(0);
  } finally {
    await server.stop();
  }
});

test('of a long text only what is in sight is drawn, where the text is', async ({ page, server }) => {
  await open(page, server, 'rules?tab=edit');
  const text = page.getByRole('textbox', { name: /^Rule file/ });
  const rule = (i: number) => `  - {key: api_key, value: caller-${i}, name: rule-${i}, limit: ${i + 1}/hour}`;
  const long = `domain: sample\ndescriptors:\n${Array.from({ length: 3_000 }, (_, i) => rule(i)).join('\n')}\n`;
  // Pasted, as people do; a browser takes minutes for so many lines that are typed at once.
  await text.evaluate((area: HTMLTextAreaElement, whole) => {
    area.value = whole;
    area.focus();
    area.select();
  }, long);
  await page.keyboard.press('Control+X');
  await expect(text).toHaveValue('');
  await page.keyboard.press('Control+V');
  await expect.poll(() => text.evaluate((area: HTMLTextAreaElement) => area.value.length)).toBe(long.length);
  await expect(page.getByText(/^And 2,8\d\d more\.$/).first(), 'it is checked, and its changes are listed').toBeVisible({ timeout: 40_000 });
  const editor = page.locator('.editor');
  expect(await editor.evaluate((box) => box.querySelectorAll('pre .line').length), 'lines out of view are not drawn').toBeLessThan(300);

  // The coloured copy lies under the text, wherever it is scrolled to.
  await text.evaluate((area: HTMLTextAreaElement) => {
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  });
  await editor.evaluate((box) => box.scrollTo({ top: box.scrollHeight }));
  await expect(editor.locator('pre')).toContainText('rule-2999');
  await page.keyboard.type('# end');
  await expect(editor.locator('pre .line').last()).toHaveText('# end');
  await expect(editor.locator('.numbers li').last()).toHaveText('3003');
  const [box, line] = [await text.boundingBox(), await editor.locator('pre .line').last().boundingBox()];
  expect(Math.round((line?.y ?? 0) - (box?.y ?? 0))).toBe(3_002 * 20 + 8);
});

test('every key of the rule language has a sentence of help', async ({ page, server }) => {
  interface Part {
    $ref?: string;
    description?: string;
    properties?: Record<string, Part>;
  }
  const schema = (await (await fetch(`${server.admin}/admin/v1/rules/schema`)).json()) as Part & { $defs: Record<string, Part> };
  const bare: string[] = [];
  const walk = (part: unknown, place: string) => {
    if (part === null || typeof part !== 'object') return;
    for (const [name, own] of Object.entries((part as Part).properties ?? {})) {
      const text = own.description ?? schema.$defs[own.$ref?.replace('#/$defs/', '') ?? '']?.description;
      if (!text?.endsWith('.')) bare.push(`${place}.${name}`);
    }
    for (const [name, inner] of Object.entries(part)) walk(inner, `${place}.${name}`);
  };
  walk(schema, '');
  expect(bare).toEqual([]);
  await open(page, server, 'rules?tab=edit');
  await page.getByText(/^All keys \(\d+\)$/).click();
  const help = page.getByRole('region', { name: 'Help' });
  expect(await help.locator('dd').count()).toBeGreaterThan(30);
  for (const text of await help.locator('dd').allTextContents()) expect(text.trim()).not.toBe('');
  const area = page.getByRole('textbox', { name: /^Rule file/ });
  await area.evaluate((box: HTMLTextAreaElement) => box.setSelectionRange(box.value.indexOf('tiers:'), box.value.indexOf('tiers:')));
  await area.press('ArrowRight');
  await expect(help).toContainText("Limits by the caller's tier");
});
