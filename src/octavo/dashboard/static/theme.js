// Light or dark: as the system prefers, until the user chooses; the choice is kept in this browser.
const THEME_KEY = "octavo.theme";

/** Return the current theme, "light" or "dark". */
export function shownTheme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Apply the stored choice. Pages from a file may have no storage. */
export function loadTheme() {
  try {
    const chosen = localStorage.getItem(THEME_KEY);
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* no storage: use the system's preference */ }
}

/** Switch to the other theme and return it. */
export function toggleTheme() {
  const theme = shownTheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem(THEME_KEY, theme); } catch { /* no storage: only for this visit */ }
  return theme;
}
