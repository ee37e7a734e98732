// The page is built into dist/, which the server embeds. `npm run dev` serves it from here, with the API of a running server.
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

export default defineConfig({
  plugins: [svelte()],
  // The folder is kept when it is emptied: the server's build looks into it.
  build: { emptyOutDir: false, modulePreload: { polyfill: false }, assetsInlineLimit: 0 },
  server: { proxy: { '/admin': 'http://127.0.0.1:8082', '/v1': 'http://127.0.0.1:8080' } },
});
