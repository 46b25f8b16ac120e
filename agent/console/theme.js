// Run before the page is drawn, so that a theme that was chosen earlier does not
// flash up as the other one. Nothing chosen is what the system prefers.
try {
  const chosen = localStorage.getItem("inferrail.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Without storage the system's is used.
}
