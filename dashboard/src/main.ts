// Starts the page.
import { mount } from 'svelte';
import App from './App.svelte';
import './app.css';
import 'uplot/dist/uPlot.min.css';
import { applyTheme } from './lib/theme.svelte';

applyTheme();
const target = document.getElementById('app');
if (target) mount(App, { target });
