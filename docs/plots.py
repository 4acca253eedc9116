#!/usr/bin/env python3
"""Makes the plots (docs/*.svg) and the tables of docs/*.md from docs/benchmarks.toml.

    python3 docs/plots.py            writes them
    python3 docs/plots.py --check    writes nothing; exit status 1 if a file is out of date

Needs Python 3.11 and nothing else. The same figures give the same bytes. A table stands in a
document between the lines `<!-- plots.py: NAME -->` and `<!-- end -->`.
"""
import pathlib
import re
import sys
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
STYLE = """
    .page { fill: #ffffff }
    .grid { stroke: #d1d9e0 }
    .one { stroke: #1f2328; stroke-dasharray: 4 3 }
    .a { fill: #9ec5f4 } .b { fill: #2a6fbf } .d { fill: #b8560b }
    .bar-b { stroke: #2a6fbf } .bar-d { stroke: #b8560b }
    text { fill: #1f2328 }
    .small { fill: #59636e; font-size: 12px }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 }
      .grid { stroke: #3d444d }
      .one { stroke: #e6edf3 }
      .a { fill: #2f5f94 } .b { fill: #6cb0f5 } .d { fill: #f0a35e }
      .bar-b { stroke: #6cb0f5 } .bar-d { stroke: #f0a35e }
      text { fill: #e6edf3 }
      .small { fill: #9198a1 }
    }
"""


class Svg:
    """Lines of an SVG drawing that can be read on light and dark pages."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title" font-family="system-ui, sans-serif" '
            f'font-size="13">',
            f'  <title id="title">{title}</title>',
            f'  <style>{STYLE}  </style>',
            f'  <rect class="page" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x, y, text, anchor="start", kind=None):
        kind = f' class="{kind}"' if kind else ''
        self.parts.append(f'  <text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>')

    def line(self, x1, y1, x2, y2, kind, width=1):
        self.parts.append(f'  <line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'stroke-width="{width}"/>')

    def rect(self, x, y, width, height, kind):
        self.parts.append(f'  <rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{height:.1f}"/>')

    def dot(self, x, y, kind):
        self.parts.append(f'  <circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')

    def legend(self, x, y, names, step, kinds='bd'):
        for kind, name in zip(kinds, names):
            self.rect(x, y - 10, 12, 12, kind)
            self.text(x + 18, y, name)
            x += step

    def end(self):
        return '\n'.join(self.parts + ['</svg>', ''])


def llama_cpp(data):
    """Bars per weight type, one panel each for prefill and decode; a line at "as fast as llama.cpp"."""
    svg = Svg(760, 500, "Tokens per second of HearthNet divided by those of llama.cpp, by weight type")
    svg.text(20, 26, "Tokens per second, HearthNet divided by llama.cpp (longer is faster)")
    svg.legend(20, 50, data['columns'], 175)
    for panel, top, most in (('prefill', 70, 8), ('decode', 280, 3)):
        bottom, height = top + 170, 150
        for value in range(most + 1):
            y = bottom - height * value / most
            svg.line(60, y, 740, y, 'one' if value == 1 else 'grid')
            svg.text(52, y + 4, f'{value}', 'end', 'small')
        svg.text(62, top + 12, panel)
        for group, (name, values) in enumerate(data[panel].items()):
            x = 76 + group * 112
            for bar, value in enumerate(values):
                tall = height * float(value) / most
                svg.rect(x + bar * 44, bottom - tall, 38, tall, 'bd'[bar])
            svg.text(x + 43, bottom + 18, name, 'middle')
    svg.text(20, 486, "Dashed line: as fast as llama.cpp. SmolLM2, two virtual cores of a Zen 4 EPYC, medians of five runs.",
             kind='small')
    return svg.end()


def mesh(data):
    """Median and range of each ratio on two machines."""
    svg = Svg(760, 270, "Ratios of bench mesh on two machines, median and range")
    svg.text(20, 26, "Tokens per second over two hosts, divided by one thread alone")
    svg.legend(20, 50, ["Xeon, busy neighbours", "Zen 4 EPYC, quieter"], 200)
    left, right, most = 190, 730, 4

    def at(value):
        return left + (right - left) * float(value) / most

    for value in range(most + 1):
        svg.line(at(value), 66, at(value), 222, 'one' if value == 1 else 'grid')
        svg.text(at(value), 238, f'{value}', 'middle', 'small')
    for row, name in enumerate(data['cases']):
        y = 92 + row * 52
        svg.text(left - 14, y + 4, name, 'end')
        for machine, kind, down in (('xeon', 'b', -10), ('epyc', 'd', 10)):
            median, low, high = data[machine][row]
            svg.line(at(low), y + down, at(high), y + down, f'bar-{kind}', 3)
            svg.dot(at(median), y + down, kind)
            svg.text(at(high) + 10, y + down + 4, median, kind='small')
    svg.text(20, 260, "Dot: median; bar: lowest to highest. 8 chats: divided by one chat over the same hosts. "
             "Dashed line: no gain, no loss.", kind='small')
    return svg.end()


def grouped(title, legend, step, groups, foot):
    """Bars of percentages from 0 to 100, in groups: name, and values in the order of the legend."""
    svg = Svg(760, 300, title)
    svg.text(20, 26, title)
    svg.legend(20, 50, legend, step, 'bad')
    for value in range(0, 101, 25):
        y = 240 - 1.6 * value
        svg.line(60, y, 740, y, 'grid')
        svg.text(52, y + 4, f'{value}', 'end', 'small')
    wide = 670 / len(groups)
    for group, (name, values) in enumerate(groups):
        x, bar = 68 + group * wide, wide * 0.9 / len(values)
        for place, value in enumerate(values):
            tall, left = 1.6 * float(value.rstrip('%')), x + place * bar
            svg.rect(left, 240 - tall, bar - 3, tall, 'bad'[place])
            svg.text(left + (bar - 3) / 2, 235 - tall, f'{float(value.rstrip("%")):.0f}', 'middle', 'small')
        svg.text(x + wide * 0.43, 260, name, 'middle')
    svg.text(400, 286, foot, 'middle', 'small')
    return svg.end()


def privacy(data):
    """Share of tokens that a host recovers, by private first layers."""
    return grouped("Tokens of a prompt that a host recovers, in percent",
                   ["trained network", "linear probe", "embedding lookup"], 160,
                   [(row[0], [row[3], row[2], row[1]]) for row in data['rows']],
                   "private first layers; by guessing and checking, a host found all 48 words tried at each of 1 to 8")


def privacy_noise(data):
    """What noise hides, and what it costs."""
    return grouped("Rows behind two private layers, with noise: tokens that a host recovers, in percent",
                   ["trained network", "nearest of 64 guesses", "next token changed"], 180,
                   [(row[0], [row[2], row[3], row[4]]) for row in data['rows']],
                   "norm of the noise as a part of the row's; a higher orange bar means a more different answer")


def sensitivity(data):
    """What finds noise of each strength, and what it changes."""
    return grouped("Noise that a host adds to its rows: positions in percent",
                   ["refused by the bands", "found by an audit", "next token changed"], 180,
                   [(row[0], [row[1], row[7], row[2]]) for row in data['rows']],
                   "strength: norm of the noise as a part of the row's, in every layer of the host")


def table(columns, rows):
    lines = [columns, ['---'] * len(columns), *rows]
    return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def outputs(data):
    """Every file that is made, with its content."""
    ratios = data['llama_cpp']
    tables = {
        'llama_cpp': table(['weights', *ratios['columns']], [
            [name, *(f'{p} / {d}' for p, d in zip(prefill, ratios['decode'][name]))]
            for name, prefill in ratios['prefill'].items()]),
        **{name: table(data[name]['columns'], data[name]['rows'])
           for name in ('shapes', 'large', 'leakage', 'leakage_last', 'languages', 'auditor', 'noise', 'sensitivity',
                        'detection')},
    }
    made = {HERE / f'{make.__name__.replace("_", "-")}.svg': make(figures) for make, figures in (
        (llama_cpp, ratios), (mesh, data['mesh']), (privacy, data['leakage']),
        (privacy_noise, data['noise']), (sensitivity, data['sensitivity']))}
    for path in sorted(HERE.glob('*.md')):
        text = path.read_text(encoding='utf-8')
        made[path] = re.sub(
            r'(<!-- plots\.py: (\w+) -->\n)(.*?)(<!-- end -->)',
            lambda found: f'{found[1]}\n{tables[found[2]]}\n{found[4]}', text, flags=re.DOTALL)
    return made


def main():
    data = tomllib.loads((HERE / 'benchmarks.toml').read_text(encoding='utf-8'))
    check, stale = sys.argv[1:] == ['--check'], False
    for path, content in outputs(data).items():
        if path.exists() and path.read_text(encoding='utf-8') == content:
            continue
        stale = True
        if check:
            print(f'docs/{path.name} is out of date: run python3 docs/plots.py', file=sys.stderr)
        else:
            path.write_text(content, encoding='utf-8')
            print(f'docs/{path.name}')
    return 1 if check and stale else 0


if __name__ == '__main__':
    sys.exit(main())
