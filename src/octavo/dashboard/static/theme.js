// Light or dark: as the system prefers, until somebody chooses; the choice is kept in this browser.
const THEME_KEY = "octavo.theme";

/** "light" or "dark": what is shown now. */
export function shownTheme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Take over the choice of last time. Pages from a file may have no storage. */
export function loadTheme() {
  try {
    const chosen = localStorage.getItem(THEME_KEY);
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* no storage here: the system's preference it is */ }
}

/** Choose the other one; gives it. */
export function toggleTheme() {
  const theme = shownTheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem(THEME_KEY, theme); } catch { /* only for this visit, then */ }
  return theme;
}
