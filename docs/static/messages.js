// On the search page: a pasted error or warning finds its entry on the page of messages first. The site's own search wants every word of
// the query on a page, and a pasted message has values in it that stand on none.
// docs/conf.py writes window.ray_adascale_messages, pairs of an anchor and a text with "..." for each value (docs/messages.py).
(function () {
  "use strict";

  const telling = (text) => new Set(text.toLowerCase().match(/[a-z_](?:[a-z_']*[a-z_])/g) || []);

  // The entries that share most with the query, best first. A word counts the more the fewer messages have it. Of the entry's or the
  // query's words, whichever are fewer, most must be shared: a part of a message may be pasted, or a whole log with one in it.
  function find(entries, query) {
    const words = entries.map(([, text]) => telling(text));
    const wanted = telling(query);
    const has = new Map();
    for (const each of words) for (const word of each) has.set(word, (has.get(word) || 0) + 1);
    const weight = (word) => (has.has(word) ? Math.log(1 + entries.length / has.get(word)) : 0);
    const sum = (some) => [...some].reduce((total, word) => total + weight(word), 0);
    return entries
      .map(([anchor, text], i) => {
        const shared = [...words[i]].filter((word) => wanted.has(word));
        const both = sum(shared);
        const share = both / Math.min(sum(words[i]), sum(wanted) || 1);
        return { anchor, text, share, shared: shared.length, score: share * share * both };
      })
      .filter((each) => each.shared >= 3 && each.share > 0.6)
      .sort((a, b) => b.score - a.score)
      .slice(0, 3);
  }

  globalThis.ray_adascale_find = find;
  if (typeof document === "undefined") return;
  document.addEventListener("DOMContentLoaded", () => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const results = document.getElementById("search-results");
    const found = find(window.ray_adascale_messages || [], query);
    if (!results || telling(query).size < 3 || !found.length) return;
    const list = document.createElement("ul");
    list.id = "message-results";
    for (const { anchor, text } of found) {
      const link = document.createElement("a");
      link.href = "docs/reference/messages.html#" + anchor;
      link.textContent = text;
      list.appendChild(document.createElement("li")).appendChild(link);
    }
    const title = document.createElement("h2");
    title.textContent = "Messages of the package";
    results.before(title, list);
  });
})();
