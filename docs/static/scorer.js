"use strict";
// How the search orders what it finds: pages that have the words in their titles first, and guides before the reference,
// the sources. The numbers but those of `score` are Sphinx's own.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, , , score]) => {
    const query = new URLSearchParams(location.search).get("q") || "";
    const words = query.toLowerCase().match(/\w{3,}/g) || [];
    const isReference = page.startsWith("reference/"); // where a part of a name, as in `retry_now`, says little
    const inTitle = words.filter((word) =>
      new RegExp(isReference ? `\\b${word}\\b` : `\\b${word.slice(0, 5)}`, "i").test(title));
    const isForDevelopers = /^(design|project|source)\//.test(page);
    const isGuide = /^(guides|start)\//.test(page); // of equal pages the guide is first
    const isMigrating = page.startsWith("migrating/"); // it names nearly everything
    const rank = isGuide - 4 * isMigrating - 12 * isReference - 20 * isForDevelopers;
    return score + 6 * inTitle.length + rank;
  },
};
