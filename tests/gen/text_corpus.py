"""Texts that tokenizers tend to get wrong, shared by the text_* generators. All written for this project."""

TRAINING = [
    "The harbour master counted the boats twice, because the first count had been interrupted by rain.",
    "Nobody reads the manual; everybody asks the neighbour, who has not read it either.",
    "In 1997 there were 12 lighthouses on this coast, in 2024 there are 3 and a half.",
    "Der alte Leuchtturm steht noch, doch seine Lampe wird längst von einem Rechner gesteuert.",
    "L'été dernier, l'équipe a compté 1 204 oiseaux près de la jetée; c'était un record.",
    "Каждое утро смотритель записывает погоду в толстую тетрадь.",
    "毎朝、灯台守は海の色を記録する。今日は灰色です。",
    "灯塔的光每十秒闪一次，渔民们靠它回家。",
    "등대지기는 매일 아침 바다의 색을 적는다.",
    "def count(boats):\n    total = 0\n    for boat in boats:\n        if boat.name != \"\":\n            total += 1\n    return total\n",
    "fn main() {\n\tlet x: u32 = 0x1F;\n\tprintln!(\"{x:?}\");\n}\n",
    "{\"name\": \"Aurora\", \"crew\": [1, 2, 3], \"tide\": null, \"depth\": -4.5e-3}\n",
    "the the the boat boats boating harbour harbours counting counted recount lighthouse lighthouses",
]

TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\r\n", " \n ", "a", " a", "a ", "  a  b   c    ",
    "Hello world", " Hello world", "Hello  world ", "hello, world!", " ,b", "a ,b . c", "    .", "\n\n  x",
    "The harbour master counted the boats.", "I'll don't we've IT'S they'd you're I'M",
    "1", "12", "123", "1234567890", "3.14159 1,204 0x1F 1e-5", "x1y22z333", "१२३ ٤٥٦ ½ ²",
    "def f(x):\n    return x  # comment\n\n\nclass A:\n\tpass\n", "if (a<b && c>d) { x[i] += y->z; }",
    "    indented\n        more\n\ttab\n", "a" * 50, " " * 50 + "x", "\n" * 20, "ab" * 40,
    "École déjà vu naïve coöperate Ångström", "e\u0301 vs \u00e9", "ǅ ß ﬁ Ω K Å",
    "日本語のテスト、です。", "灯塔的光", "한국어 시험", "Привет, мир!", "مرحبا بالعالم", "שלום עולם", "สวัสดีชาวโลก", "नमस्ते दुनिया",
    "👍", "👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈", "🎉🎉🎉", "a👍b", "é👍", "🇩🇪🇯🇵", "☃️❄", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "zero\u200bwidth\u200djoin\ufeffbom", "nbsp\u00a0thin\u2009ideo\u3000end", "\u0000\u0001\u001f\u007f", "\ufffd\ufffd",
    "line\u2028sep\u2029para\u0085nel\u000bvt\u000cff", "▁ ▁▁a▁b", "Ġthe Ċ", "<0x41><0xE2>", "ĠĊâ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "a<|im_end|>b <|im_end|> c", "<|im_start", "<bos><eos><pad><unk>", "<start_of_turn>user\nx<end_of_turn>",
    "<s></s> <s> </s>x", "[INST] hi [/INST]", "<think>a</think>b", "<tool_call>\n{}\n</tool_call>", "<mark> <mark>x <mark>", "a<glue>b", "snip snips snip.", "NORM norm <NORM>",
    "https://example.org/a?b=c&d=%20#e", "user@example.org", "/usr/local/bin", "C:\\Users\\x", "a_b-c.d/e", "$\\alpha^2 + \\beta$", "| a | b |\n|---|---|\n",
    "....", "!!!???", "---", "''''", "\"\"\"", "()[]{}<>", "a--b", "...x", "¿Qué? ¡No!", "“quotes” ‘x’ — – …",
    "supercalifragilisticexpialidocious antidisestablishmentarianism", "XMLHttpRequest camelCase snake_case SCREAMING",
]
