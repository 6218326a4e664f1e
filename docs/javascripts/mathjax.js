window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    processEscapes: true,
    processEnvironments: true,
  },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};

// Pages may be exchanged without a reload.
document$.subscribe(() => {
  MathJax.startup?.output?.clearCache();
  MathJax.typesetClear?.();
  MathJax.texReset?.();
  MathJax.typesetPromise?.();
});
