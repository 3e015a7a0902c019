"""BM25 finds documents in scripts with and without blanks between words."""

from pathlib import Path

import bm25s
import numpy as np
import pytest

from contaccum.retrieval.bm25 import bm25_run, fuse_runs, split_words

README = Path(__file__).parents[2] / "README.md"

# {language: [(document, query that it answers)]}
TEXTS = {
    "Chinese": [
        ("故宫位于北京中轴线的中心，是明清两代的皇家宫殿。", "明清的皇家宫殿在哪里？"),
        ("大熊猫主要生活在四川的竹林里，以竹子为食。", "大熊猫吃什么"),
        ("训练时若 GPU 显存不足，可以减小批量或使用梯度累积。", "GPU显存不足怎么办"),
    ],
    "Japanese": [
        ("富士山は静岡県と山梨県にまたがる日本一高い山である。", "日本で一番高い山はどこですか"),
        ("寿司は酢飯と魚介類を組み合わせた日本料理である。", "酢飯に魚をのせた料理は何ですか"),
        ("新幹線は東京と新大阪を最短約二時間半で結ぶ。", "東京から新大阪までの時間は"),
    ],
    "Korean": [
        ("서울은 대한민국의 수도이자 최대 도시이다.", "대한민국 수도는 어디인가요"),
        ("김치는 배추를 소금에 절여 발효시킨 음식이다.", "배추로 만드는 발효 음식은"),
        ("한글은 세종대왕이 창제한 문자이다.", "세종대왕께서 만드신 문자는"),
    ],
    "Thai": [
        (
            "กรุงเทพมหานครเป็นเมืองหลวงและเมืองที่มีประชากรมากที่สุดของประเทศไทย",
            "เมืองหลวงของประเทศไทยคือที่ใด",
        ),
        ("ข้าวเหนียวมะม่วงเป็นขนมหวานที่ทำจากข้าวเหนียวมูนกับมะม่วงสุก", "ขนมที่ทำจากมะม่วงสุกเรียกว่าอะไร"),
        ("ช้างเอเชียเป็นสัตว์บกที่มีขนาดใหญ่ที่สุดในทวีปเอเชีย", "สัตว์บกขนาดใหญ่ในเอเชียคืออะไร"),
    ],
    "Khmer": [
        ("ភ្នំពេញជារាជធានីនៃព្រះរាជាណាចក្រកម្ពុជា", "រាជធានីរបស់កម្ពុជា"),
        ("អង្គរវត្តជាប្រាសាទធំជាងគេ", "ប្រាសាទអង្គរវត្ត"),
    ],
    "Hindi, whose vowel signs are no letters": [("पानी पीना", "पानी"), ("चाय बनाना", "चाय")],
    "a single character": [("水", "水"), ("火", "火")],
}


@pytest.mark.parametrize("language", TEXTS)
def test_bm25_finds_the_document_of_each_query_first(language):
    corpus = {str(row): {"text": document} for row, (document, _) in enumerate(TEXTS[language])}
    queries = {f"q{row}": query for row, (_, query) in enumerate(TEXTS[language])}
    run = bm25_run(corpus, queries, top_k=1)
    assert [list(hits) for hits in run.values()] == [[document] for document in corpus]


def test_english_texts_have_the_words_of_bm25s():
    lines = [*README.read_text(encoding="utf-8").splitlines(), "Naïve café_2, 10⁻⁴ cm² of Å; I'm x"]
    words = bm25s.tokenize(lines, stopwords=[], return_ids=False, show_progress=False)
    assert [split_words(line) for line in lines] == words


def test_a_script_without_blanks_is_cut_into_ngrams_and_the_rest_into_words():
    assert split_words("GPU显存不足 5月 ๒๕๖๗") == ["gpu", "显存", "存不", "不足", "月", "๒๕๖๗"]
    assert split_words("ไทย ดี") == ["ไทย", "ดี"]


def test_characters_of_full_and_half_width_match_their_usual_forms():
    assert split_words("ＧＰＵ１２　ｶﾞｲﾄﾞ cm²") == split_words("gpu12 ガイド cm²")


def test_fused_scores_are_the_weighted_scores_scaled_to_0_1_per_query():
    generator = np.random.default_rng(0)
    documents = [f"d{number}" for number in range(6)]
    dense = {"q0": dict(zip(documents[:4], generator.normal(size=4), strict=True))}
    sparse = {"q0": dict(zip(documents[2:], 9 * generator.random(4), strict=True))}
    dense |= {"q1": {"d0": 0.3}, "q2": {"d0": 0.3, "d1": 0.1}}
    sparse["q1"] = {"d1": 7.0, "d0": 5.0}
    fused = fuse_runs(dense, sparse, 0.3)
    expected = np.zeros(6)
    values = np.array(list(dense["q0"].values()))
    expected[:4] += 0.7 * (values - values.min()) / np.ptp(values)
    values = np.array(list(sparse["q0"].values()))
    expected[2:] += 0.3 * (values - values.min()) / np.ptp(values)
    assert [fused["q0"][document] for document in documents] == pytest.approx(list(expected))
    assert list(fused["q0"].values()) == sorted(fused["q0"].values(), reverse=True)
    assert fused["q1"] == pytest.approx({"d0": 0.7, "d1": 0.3})
    assert fused["q2"] == pytest.approx({"d0": 0.7, "d1": 0.0})  # no word in common
    assert list(fuse_runs(dense, sparse, 0.0)["q2"]) == ["d0", "d1"]


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_more_documents_change_no_score_of_the_best_100_and_follow_them(weight):
    """The best weight of BM25 was chosen on the scale of 100 documents."""
    generator = np.random.default_rng(0)
    documents = [f"d{number}" for number in range(1000)]
    runs = []
    for scores in (generator.normal(size=1000), 9 * generator.exponential(size=1000)):
        order = np.argsort(-scores)[:600]  # each lacks documents of the other
        runs.append({"q": {documents[row]: float(scores[row]) for row in order}})
    shallow = fuse_runs(*({"q": dict(list(run["q"].items())[:100])} for run in runs), weight)["q"]
    deep = fuse_runs(*runs, weight)["q"]
    assert list(deep.items())[: len(shallow)] == list(shallow.items())
    rest = list(deep)[len(shallow) :]
    assert set(shallow) | set(rest) == runs[0]["q"].keys() | runs[1]["q"].keys()
    for document in rest:
        expected = 0.0
        for share, run in zip((1 - weight, weight), runs, strict=True):
            values = list(run["q"].values())
            score = run["q"].get(document, values[-1])
            expected += share * (score - values[99]) / (values[0] - values[99])
        assert deep[document] == pytest.approx(expected)
        assert deep[document] <= 0
