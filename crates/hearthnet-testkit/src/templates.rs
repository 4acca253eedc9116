//! Hostile chat templates, which try to exhaust the caller's time or memory.

/// Templates by name. `@loop` and `@end` stand for many rounds, `@text` and `@list` for a large value.
const WRITTEN: &str = include_str!("templates.txt");

/// Names and templates that would exhaust time or memory if rendering were unlimited.
///
/// The loops end at the step limit of a rendering; the attack is on the cost per step.
///
/// # Panics
/// If `templates.txt` is malformed.
pub fn hostile_templates() -> Vec<(&'static str, String)> {
    let short = [
        (
            "@loop",
            "{% for i in range(99999) %}{% for j in range(9) %}",
        ),
        ("@end", "{% endfor %}{% endfor %}"),
        ("@text", "{% set s = 'x' * 4000000 %}"),
        ("@list", "{% set l = range(99999) | list %}"),
    ];
    let written = WRITTEN.split("# ").skip(1).map(|entry| {
        let (name, template) = entry.split_once('\n').expect("a name and a template");
        let template = template.trim_end().to_owned();
        let whole = |template: String, (word, text): &(&str, &str)| template.replace(word, text);
        (name, short.iter().fold(template, whole))
    });
    let many = |piece: &str, times: usize| piece.repeat(times);
    let macros = (0..30).map(|n| {
        let inner = n + 1;
        let twice = format!("{{{{ m{inner}() }}}}{{{{ m{inner}() }}}}");
        format!("{{% macro m{n}() %}}{twice}{{% endmacro %}}")
    });
    let macros = macros.collect::<String>() + "{% macro m30() %}xxxxxxxx{% endmacro %}{{ m0() }}";
    let chain = many(&format!("{{{{ a{} }}}}", many("-1", 1500)), 40);
    let products = many("{% set a = 'x' * 100000000 %}", 4000);
    let comparisons = many("{{ [1] * 99999999 == [1] * 99999999 }}", 2500);
    let repeated = [
        ("constant products", products),
        ("constant comparisons", comparisons),
        (
            "a long chain",
            format!("{{{{ a{} }}}}", many("~'x'", 30_000)),
        ),
        ("long chains", chain),
        ("macros in macros", macros),
    ];
    written.chain(repeated).collect()
}
