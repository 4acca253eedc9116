//! Hostile chat templates, which try to exhaust the caller's time or memory.

/// Names and templates that would exhaust time or memory if rendering were unlimited.
///
/// The loops end at the step limit of a rendering; the attack is on the cost per step.
pub fn hostile_templates() -> Vec<(&'static str, String)> {
    const LOOP: &str = "{% for i in range(99999) %}{% for j in range(9) %}";
    const END: &str = "{% endfor %}{% endfor %}";
    let each = |before: &str, step: &str| format!("{before}{LOOP}{step}{END}");
    let text = "{% set s = 'x' * 4000000 %}";
    let list = "{% set l = range(99999) | list %}";
    let many = |piece: &str, times: usize| piece.repeat(times);
    vec![
        (
            "subscript",
            each(text, "{% if s[3999999] == 'y' %}{% endif %}"),
        ),
        ("length", each(text, "{% if s | length == 1 %}{% endif %}")),
        ("test", each(text, "{% if s is upper %}{% endif %}")),
        ("last", each(text, "{% if s | last == 'y' %}{% endif %}")),
        (
            "slice",
            each(text, "{% if s[1:3999999:7] %}{% endif %}"),
        ),
        (
            "reversed",
            each(text, "{% if s[::-1] %}{% endif %}"),
        ),
        (
            "trim",
            "{{ ('a' * 4000000) | trim('b' * 4000000 ~ 'a') }}".to_owned(),
        ),
        (
            "strip",
            "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}".to_owned(),
        ),
        (
            "select",
            format!("{list}{{{{ l | select('in', l) | list | length }}}}"),
        ),
        (
            "select by text",
            "{{ ('x' * 1000000) | select('in', 'y' * 1000000) | list }}".to_owned(),
        ),
        (
            "map",
            format!("{list}{{{{ l | map('default', 'x' * 1000000) | list | length }}}}"),
        ),
        (
            "sorted by a long name",
            "{% set l = [{'x': 1}] * 99999 %}{{ l | sort(attribute='x' * 1000000) | length }}"
                .to_owned(),
        ),
        (
            "looked up by what is long",
            format!(
                "{text}{{% set d = {{s: 1}} %}}{LOOP}{{% if d[s] %}}{{% endif %}}{{% if d.get(s) %}}{{% endif %}}{END}"
            ),
        ),
        (
            "constant products",
            many("{% set a = 'x' * 100000000 %}", 4000),
        ),
        (
            "constant comparisons",
            many("{{ [1] * 99999999 == [1] * 99999999 }}", 2500),
        ),
        (
            "constant powers",
            many("{{ 9 ** 99999999 }}", 1),
        ),
        (
            "a long chain",
            format!("{{{{ a{} }}}}", many("~'x'", 30_000)),
        ),
        (
            "long chains",
            many(&format!("{{{{ a{} }}}}", many("-1", 1500)), 40),
        ),
        (
            "macros in macros",
            (0..30)
                .map(|n| {
                    let inner = n + 1;
                    format!("{{% macro m{n}() %}}{{{{ m{inner}() }}}}{{{{ m{inner}() }}}}{{% endmacro %}}")
                })
                .collect::<String>()
                + "{% macro m30() %}xxxxxxxx{% endmacro %}{{ m0() }}",
        ),
        (
            "captured and doubled",
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"
                .to_owned(),
        ),
        (
            "a list of lists of itself",
            "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
                .to_owned(),
        ),
        (
            "a dictionary that grows",
            "{% set ns = namespace(d={}) %}{% for i in range(99999) %}{% set ns.d = dict(ns.d, **{'k' ~ i: i}) %}{% endfor %}"
                .to_owned(),
        ),
        (
            "a namespace in itself",
            "{% set f = namespace %}{% set a = f(x=1) %}{% set b = f(x=a) %}{% set a.y = b.x %}{% set a.z = a.items() %}{{ a.z | list }}"
                .to_owned(),
        ),
        (
            "replaced between all",
            "{{ ('x' * 4000000) | replace('', 'y' * 1000000) }}".to_owned(),
        ),
        (
            "joined by much",
            "{{ ('x' * 4000000) | join('y' * 1000000) }}".to_owned(),
        ),
        ("a wide format", "{{ '%999999999d' | format(1) }}".to_owned()),
        (
            "a wide format by argument",
            "{{ '{0:{1}}'.format(1, 999999999) }}".to_owned(),
        ),
        (
            "a wide margin",
            "{{ ('x\n' * 1000000) | indent(1000000) }}".to_owned(),
        ),
        (
            "deep JSON with a margin",
            "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x] * 3 %}{% endfor %}{{ ns.x | tojson(indent=16) }}"
                .to_owned(),
        ),
        (
            "much JSON",
            each(
                "{% set l = [[]] * 20000 %}",
                "{% if l | tojson(indent=16) %}{% endif %}",
            ),
        ),
        (
            "a loop over each character",
            each(text, "{% for c in s %}{% endfor %}"),
        ),
        (
            "many arguments",
            each(
                list,
                "{% if namespace(*l) %}{% endif %}",
            ),
        ),
        (
            "a range beyond numbers",
            "{{ range(9223372036854775807, -9223372036854775807, -1) | list }}".to_owned(),
        ),
        (
            "lists that are compared",
            each(list, "{% if l == l %}{% endif %}{% if l < l %}{% endif %}"),
        ),
        (
            "lists that are sorted",
            each(list, "{% if l | sort(reverse=true) %}{% endif %}"),
        ),
        (
            "lists that are added up",
            "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l | length }}"
                .to_owned(),
        ),
        (
            "lists without end",
            each(list, "{% set m = l[1:] %}{% if m[99990] %}{% endif %}{% if m | last %}{% endif %}"),
        ),
        (
            "recursion through a loop",
            "{% for a in [1, 2] recursive %}{{ loop([a, a]) }}{% endfor %}".to_owned(),
        ),
        (
            "unpacked lists",
            each(list, "{% set (a, b) = l %}"),
        ),
    ]
}
