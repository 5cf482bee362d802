"""The site's search in Chinese: every pair of neighbouring characters is a word, in the pages and in what is asked.

A dictionary's cut would decide what can be found: 梯度累积 cut as 梯度 and 累积 is no word of the index. Pairs find any
run of characters, on pages that have all of its pairs. Single characters are indexed as well; words in Latin letters
are stemmed as on the English site.
"""

import re
from itertools import pairwise

from sphinx.search.en import SearchEnglish

_RUN = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")
_SPLITTER = r"""
var splitQuery = (query) =>
  [...query.matchAll(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{Letter}\p{Number}_])+/gu)].flatMap(([run]) =>
    /[\u3400-\u9fff]./u.test(run) ? [...run].slice(1).map((next, place) => [...run][place] + next) : [run]);
"""


class SearchPairs(SearchEnglish):
    """Sphinx asks it for a text's words, and puts its splitter into the page of results."""

    lang = "zh"
    js_splitter_code = _SPLITTER

    def split(self, input: str) -> list[str]:
        """The words of a text: pairs and single characters of Chinese, and other words as they stand."""
        found = []
        for run in _RUN.findall(input):
            found += [*run, *map("".join, pairwise(run))] if "\u3400" <= run[0] <= "\u9fff" else [run]
        return found
