"""scripts/complexity.py: the cognitive complexity that clang-tidy counts for the same functions."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "complexity.py"

# Behind each function is what clang-tidy 14 counts.
FUNCTIONS = r"""
int g(int); bool p(int, bool = false);
int one_if(int a) { if (a) return 1; return 2; }  // 1
int chain(int a) { if (a) { if (a > 1) return 1; else return 3; } else if (a < 2) { for (;;) g(1); } return 2; }  // 7
int ternaries(bool a, bool b, bool c) { return a && b && c ? 1 : a || b && c || b ? 2 : 3; }  // 6
bool calls(bool a, bool b, bool c) { return a && !(b && c) && p(1, b && c || a); }  // 3
bool casts(int a) { return static_cast<int>(a && (a > 2 && true)) + int(a && a); }  // 2
bool same_again(bool a, bool b) { return a && p(1) && b && p(2, a && b); }  // 2
int in_lambda(int a) { const auto l = [&](int x) { if (x) return 1; return x > 2 ? 3 : 4; }; return l(a); }  // 4
template <class F> int argument(F f, int a) {  // 4
  return f([&]<class T, bool kFirst>(T x) { if (x && a) return 1; return 2; }) && a;
}
int jumps(int a) { switch (a) { case 1: return 2; case 3: if (a > 4) return 1; default: break; } do { --a; }  // 5
  while (a > 1 && a < 10); return a; }
template <class T> T constexpr_if(T a) {  // 7
  if constexpr (sizeof(T) > 4) { for (int i = 0; i < 3; ++i) if (i && a) a = i; }
  return a;
}
struct S {
  S(int a) : x{a > 1 ? 2 : 3}, y(a) { if (a) x = 1; }  // 2
  ~S() { if (x) y = 0; }  // 1
  operator bool() const { return x && y; }  // 1
  int operator()(int a) { return a ? 1 : 0; }  // 1
  S& operator=(const S& o) { if (&o != this) x = o.x; return *this; }  // 1
  int x, y;
};
int catches(int a) { try { g(a); } catch (int e) { if (e) return 1; } catch (...) { } goto end; end: return 1; }  // 5
int all_try(int a) try { return g(a); } catch (int e) { if (e) return 1; return 2; }  // 3
int local_class(int a) { struct L { int m(int x) { if (x) return 1; return 2; } }; return L().m(a); }  // 2
int in_conditions(int a) {  // 12
  for (int i = 0; i < a && a < 4; i = a ? i + 1 : i + 2) g(i);
  while (a ? g(1) : g(2)) {}
  if (a ? 1 : 0) g(1);
  switch (a ? 1 : 2) {}
  return 0;
}
int values(int a) {  // 7
  if (int b = g(a); b && a) return 1;
  else if (int c = g(b); c || (a ? b : c)) return 2;
  return [&] { return a && a; }();
}
template <class T> struct Q {
  template <class U> Q(U u) noexcept(sizeof(U) > 2 && sizeof(T) > 2) : v(u), w{u ? 1 : 2} { if (u) v = 1; }  // 3
  T v; int w;
};
int dangling(int a) { if (a) if (a > 2) return 1; else return 2; else return 3; return 4; }  // 5
int references(int a) { auto&& r = a; int&& s = 2; for (auto&& x : {1, 2}) g(x); return r && s; }  // 2
int third(int a) { if (a > 0) { if (a > 1) g(1); else if (a > 2) g(2); else if (a > 3) g(3); else g(4); } }  // 6
int of_cast(int a) { return a && p(2) && static_cast<long>(a && a); }  // 1
int question(int a) { return (a ? a > 1 : a > 2) ? 1 : 2; }  // 3
int nested(int n) {  // 13
  int s = 0;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) { if (i == j) continue; s += i < j ? 1 : i > 3 ? 2 : 3; }
  return s;
}
template <int A, int B> int tiles(int);
int commas(bool a) { return a ? tiles<1, 2>(3) : g(a ? tiles<3, 4>(1) : 2); }  // 3
namespace { inline constexpr int kTable[] = {1 ? 2 : 3, 4}; enum class E { a, b }; }
"""


@pytest.fixture(scope="module")
def complexity():
    spec = importlib.util.spec_from_file_location("complexity", SCRIPT)
    module = sys.modules["complexity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXPECTED = {
    number: int(cost[1])
    for number, line in enumerate(FUNCTIONS.splitlines(), 1)
    if (cost := re.search(r"// (\d+)$", line)) is not None
}


def test_functions(complexity):
    found = complexity.functions_of(FUNCTIONS)
    assert {x.line: x.cost for x in found} == EXPECTED and len(found) == len(EXPECTED) == 28
    names = [x.name for x in found]
    assert names[:3] == ["one_if", "chain", "ternaries"] and names[-3:] == ["question", "nested", "commas"]
    assert {"S", "~S", "operator bool", "operator()", "operator=", "Q"} <= set(names)


def test_clang_tidy_counts_the_same(tmp_path):
    if shutil.which("clang-tidy") is None:
        pytest.skip("needs clang-tidy")
    file = tmp_path / "functions.cpp"
    file.write_text(FUNCTIONS.replace("\n", "#include <initializer_list>\n", 1))
    key = "readability-function-cognitive-complexity"
    options = f"{{key: {key}.Threshold, value: 0}}, {{key: {key}.DescribeBasicIncrements, value: false}}"
    command = ["clang-tidy", "--quiet", f"--checks=-*,{key}", f"--config={{CheckOptions: [{options}]}}", file]
    done = subprocess.run([*command, "--", "-std=c++20"], capture_output=True, text=True, check=True)
    found = re.findall(r":(\d+):\d+: warning: function '(.*)' has cognitive complexity of (\d+)", done.stdout)
    # The function of a local class is counted by itself, too.
    assert {int(line): int(cost) for line, name, cost in found if name != "m"} == EXPECTED


def test_what_clang_tidy_overlooks_and_the_preprocessor(complexity):
    def cost(text):
        (one,) = complexity.functions_of(text)
        return one.cost

    assert cost("void f(int x) { if (x) for (;;) g(1); else x ? g(1) : g(2); }") == 1 + 2 + 1 + 2
    assert cost("int f = 1;\nauto h = [](int x) { if (x) return 1; return 2; };") == 1
    text = 'void f(int x) {\n#if A\n  if (x) {\n#elif B\n  if (y) {\n#else\n  if (z && y) {\n#endif\n  g("if {"); }\n}'
    assert cost(text) == 1
    assert cost("#define M(x) \\\n  if (x) {\nvoid f() {\n#if 0\n if (x) {\n#else\n for (;;) g(1);\n#endif\n}") == 1
    kernel = "__global__ void __launch_bounds__(32, D < 64 ? 5 : 2)\n  f(const __grid_constant__ P p) { if (p) g(); }"
    assert cost(kernel) == 1
    assert cost("/* if (x) */ int f() { // a ? b : c\n  return g('\"', 1'000) ? 1 : 2; }") == 1
    with pytest.raises(ValueError, match="line 2: { is not closed"):
        complexity.functions_of("int x;\nvoid f() { if (x) {}")


def test_functions_above_the_bound(complexity, tmp_path, monkeypatch, capsys):
    source = "void easy(int x) { if (x) g(); }\nvoid hard(int x) { if (x) { if (x) { if (x) g(); } } }\n"
    (tmp_path / "a.cuh").write_text(source)
    (tmp_path / "a.txt").write_text(source)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path, "--most", "5"], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert first.split() == ["6", "hard", f"{tmp_path}/a.cuh:2"] and last == "2 functions in 1 files, 1 above 5"
    # Without paths, src/cuda and its allowance.
    monkeypatch.setattr(sys, "argv", ["complexity.py"])
    monkeypatch.setattr(complexity, "ROOT", tmp_path)
    (tmp_path / "src" / "cuda").mkdir(parents=True)
    hard = "if (x) {" * 12 + "}" * 12  # 78
    for allowed, count in ((2, 2), (1, 1)):
        monkeypatch.setattr(complexity, "ALLOWED", allowed)
        (tmp_path / "src" / "cuda" / "b.cu").write_text(f"void f(int x) {{ {hard} }}\n" * count)
        complexity.main()
    (tmp_path / "src" / "cuda" / "b.cu").write_text(f"void f(int x) {{ {hard} }}\n" * 2)
    with pytest.raises(SystemExit, match="2 functions above 60, where at most 1 are allowed"):
        complexity.main()
    assert "  78 f " in capsys.readouterr().out
