kept[#KEYS + 1] = now
kept[#KEYS + 2] = answers
return kept
