// How the search ranks pages: those that help before those that list what was, guides before the reference.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind !== "text") return score;
    if (/^(changelog|decisions\/.*|contributing|citation|benchmarks|design)$/.test(page)) return score - 4;
    if (/^(api|reference)\//.test(page)) return score - 2;
    return /^(how_to|recipes|getting_started|tutorials\/.*)$/.test(page) ? score + 1 : score;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
