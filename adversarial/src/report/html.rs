//! Page of a run: one HTML file without scripts, and without anything that a browser would fetch.

use super::plot::{Axis, Mark, Row, escape, rows, squares};
use super::{Conditions, End, Line, Report, time};
use crate::findings::Observation;
use crate::trial::{Effort, Outcome};

const STYLE: &str = "
:root { --page: #ffffff; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --good: #2a6fbf;
  --light: #9ec5f4; --bad: #b8560b; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --good: #6cb0f5;
    --light: #2f5f94; --bad: #f0a35e; }
}
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1200px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: 3px 8px; text-align: left;
  vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
.not-held, .not-carried-out { color: var(--bad); font-weight: bold; }
.soft { color: var(--soft); }
svg { width: 100%; max-width: 960px; display: block; font-size: 11.5px; }
svg text { fill: var(--text); }
svg .tick { fill: var(--soft); }
svg .grid { stroke: var(--line); }
svg .limit { stroke: var(--soft); stroke-width: 2; }
svg .without { fill: var(--page); stroke: var(--good); stroke-width: 2; }
svg .with { fill: var(--good); stroke: var(--good); stroke-width: 2; }
svg .with-p50 { fill: var(--light); stroke: var(--light); stroke-width: 2; }
svg .without-p50 { fill: var(--page); stroke: var(--light); stroke-width: 2; }
svg .over { fill: var(--bad); stroke: var(--bad); stroke-width: 2; }
svg .span { stroke: var(--good); stroke-width: 2; }
svg .span-p50 { stroke: var(--light); stroke-width: 2; }
svg .bar { stroke: var(--good); stroke-width: 9; }
svg .bar-over { stroke: var(--bad); stroke-width: 9; }
svg polyline { fill: none; stroke-width: 2; }
svg .line-dark { stroke: var(--good); }
svg .line-light { stroke: var(--light); stroke-width: 4; }
svg .line-bad { stroke: var(--bad); }
.grid-of-plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); }
pre { overflow-x: auto; font-size: 12px; }
svg rect.good { fill: var(--good); }
svg rect.bad { fill: var(--bad); }
svg rect.failed { fill: var(--page); stroke: var(--bad); stroke-width: 2; }
";

/// Page with a title and a body.
pub(crate) fn page_of(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
    )
}

/// Page of a run.
pub fn page(report: &Report) -> String {
    let summary = escape(report).replace('\n', "<br>");
    let mut page = format!("<p><strong>{summary}</strong></p>\n");
    page += &conditions(&report.conditions);
    page += "<h2>Claims</h2>\n<p>A square for each attack. Filled: the claim held. Orange: it did \
             not. Outline: the attack could not be carried out.</p>\n";
    page += &overview(report);
    page += "<h2>An honest caller beside the attack</h2>\n<p>Time of one step of the honest \
             caller. Ring: in the same run, before the attack. Dot: during the attack. Light: \
             median. Dark: 99th percentile; orange if it more than doubled.</p>\n";
    page += &plot(report, "Latency of the honest caller", latency);
    page += "<h2>Time to detection</h2>\n<p>From the start of an attempt (a connection, or a \
             question) until the attack was detected. Dot: median of the attempts. Line: up to \
             the slowest one. Attacks that must have no effect are not detected by a code and are \
             not in this plot.</p>\n";
    page += &plot(report, "Time to detection", detection);
    page += "<h2>Memory of the host</h2>\n<p>Growth up to the peak, in percent of what the limits \
             allow for this attack.</p>\n";
    page += &memory(report);
    page += "<h2>All attacks</h2>\n";
    page += &table(report);
    page_of("HearthNet: adversarial run", &page)
}

fn conditions(run: &Conditions) -> String {
    let latency = match run.setup.effort {
        Effort::Once => "Latencies were not measured.".to_owned(),
        Effort::Measured { steps, at_most, .. } => format!(
            "Each attack was repeated until the honest caller had made {steps} steps beside it, \
             for at most {} s.",
            at_most.as_secs()
        ),
    };
    let jobs = match run.jobs {
        1 => "One attack at a time.".to_owned(),
        jobs => format!("{jobs} attacks at a time."),
    };
    format!(
        "<p class=\"soft\">{}. HearthNet {}. {}. Host under attack: {}. Deadlines: {}. {jobs} \
         {latency}</p>\n",
        escape(&run.date),
        escape(run.version),
        escape(&run.machine),
        escape(run.setup.model),
        escape(run.setup.pace),
    )
}

fn overview(report: &Report) -> String {
    let mut groups: Vec<(&str, Vec<_>)> = Vec::new();
    for line in &report.attacks {
        let kind = match &line.end {
            End::Run(outcome) if outcome.is_good() => "good",
            End::Run(_) => "bad",
            End::Failed { .. } => "failed",
        };
        let title = format!("{} {}: {}", line.case, line.claim, line.verdict());
        let square = (kind, title, line.case);
        match groups.iter_mut().find(|(name, _)| *name == line.group) {
            Some((_, squares)) => squares.push(square),
            None => groups.push((line.group, vec![square])),
        }
    }
    squares("Verdicts by group", &groups)
}

/// Plot of times, a row for each attack for which `row` has one.
fn plot(report: &Report, title: &str, row: fn(&Line, &Outcome) -> Option<Row>) -> String {
    let all = rows_of(report, row);
    if all.is_empty() {
        return "<p class=\"soft\">Not measured in this run.</p>\n".to_owned();
    }
    let marks = all.iter().flat_map(|row| &row.marks).map(|mark| mark.at);
    let ends = all.iter().flat_map(|row| &row.lines).map(|line| line.1);
    let axis = Axis::powers(marks.chain(ends), |us| time(us.round() as u64));
    rows(title, axis, &all)
}

/// Rows of the attacks that were carried out and for which `row` has one.
fn rows_of(report: &Report, row: impl Fn(&Line, &Outcome) -> Option<Row>) -> Vec<Row> {
    let lines = report.attacks.iter();
    lines
        .filter_map(|line| row(line, line.outcome()?))
        .collect()
}

fn latency(line: &Line, outcome: &Outcome) -> Option<Row> {
    let latency = outcome.latency?;
    let [quiet, attacked] = [latency.quiet, latency.attacked].map(|of| {
        let [p50, p99] = [of.p50_us, of.p99_us].map(|us| us as f64);
        (p50, p99)
    });
    let p99 = match latency.is_within_bound() {
        true => "with",
        false => "over",
    };
    let mark = |at, kind| Mark { at, kind };
    Some(Row {
        label: line.claim.clone(),
        title: format!(
            "p50 {} without, {} with; p99 {} without, {} with ({} steps)",
            time(latency.quiet.p50_us),
            time(latency.attacked.p50_us),
            time(latency.quiet.p99_us),
            time(latency.attacked.p99_us),
            latency.steps,
        ),
        lines: vec![
            (quiet.0, attacked.0, "span-p50"),
            (quiet.1, attacked.1, "span"),
        ],
        marks: vec![
            mark(quiet.0, "without-p50"),
            mark(attacked.0, "with-p50"),
            mark(quiet.1, "without"),
            mark(attacked.1, p99),
        ],
    })
}

fn detection(line: &Line, outcome: &Outcome) -> Option<Row> {
    let detection = outcome.detection?;
    let [median, slowest] = [detection.median_us, detection.slowest_us].map(|us| us as f64);
    Some(Row {
        label: line.claim.clone(),
        title: format!(
            "{} by the median of {} attempts, {} by the slowest",
            time(detection.median_us),
            detection.attempts,
            time(detection.slowest_us),
        ),
        lines: vec![(median, slowest, "span")],
        marks: vec![Mark {
            at: median,
            kind: "with",
        }],
    })
}

fn memory(report: &Report) -> String {
    let row = |line: &Line, outcome: &Outcome| {
        let growth = outcome.memory?;
        let share = 100.0 * growth.bytes as f64 / growth.budget.bytes.max(1) as f64;
        let kind = if share <= 100.0 { "bar" } else { "bar-over" };
        Some(Row {
            label: line.claim.clone(),
            title: format!(
                "{} KiB of {} KiB: {}",
                growth.bytes >> 10,
                growth.budget.bytes >> 10,
                growth.budget.why
            ),
            lines: vec![(0.0, share, kind)],
            marks: Vec::new(),
        })
    };
    let all = rows_of(report, row);
    if all.is_empty() {
        return "<p class=\"soft\">This system does not report it.</p>\n".to_owned();
    }
    let ends = all.iter().flat_map(|row| &row.lines).map(|line| line.1);
    let most = ends.fold(100.0, f64::max);
    let axis = Axis {
        from: 0.0,
        to: (most / 100.0).ceil() * 100.0,
        log: false,
        label: |percent| format!("{percent:.0} %"),
    };
    rows(
        "Growth of the host's memory in percent of its limit",
        axis,
        &all,
    )
}

fn table(report: &Report) -> String {
    let mut table = String::from(
        "<table>\n<tr><th>#</th><th>claim</th><th>code (counted)</th><th>verdict</th>\
         <th>time to detection</th><th>peak memory (growth)</th><th>p50 without/with</th>\
         <th>p99 without/with</th></tr>\n",
    );
    for line in &report.attacks {
        let [case, claim, code, verdict, detected, memory, p50, p99] = line.cells().map(escape);
        let class = verdict.to_lowercase().replace(' ', "-");
        let observations = line
            .outcome()
            .map(|outcome| outcome.observations.as_slice());
        let failures: String = (line.failures().iter())
            .map(|failure| format!("<br><span class=\"{class}\">{}</span>", escape(failure)))
            .collect();
        table += &format!(
            "<tr id=\"case-{case}\"><td class=\"number\">{case}</td><td>{claim}{failures}{}</td>\
             <td>{code}</td><td class=\"{class}\">{verdict}</td>\
             <td class=\"number\">{detected}</td><td class=\"number\">{memory}</td>\
             <td class=\"number\">{p50}</td><td class=\"number\">{p99}</td></tr>\n",
            details(observations.unwrap_or_default()),
        );
    }
    table + "</table>\n"
}

/// Attempts of an attack, with the expected and the observed results, folded away. Equal
/// observations of a repeated attack are one line.
fn details(observations: &[Observation]) -> String {
    let mut lines: Vec<(&Observation, usize)> = Vec::new();
    for one in observations {
        let same = |(other, _): &&mut (&Observation, usize)| {
            (&other.what, &other.expected, &other.seen) == (&one.what, &one.expected, &one.seen)
        };
        match lines.iter_mut().find(same) {
            Some((_, times)) => *times += 1,
            None => lines.push((one, 1)),
        }
    }
    if lines.is_empty() {
        return String::new();
    }
    let items: String = (lines.iter())
        .map(|(one, times)| {
            format!(
                "<li>{}: {}{}</li>",
                escape(&one.what),
                escape(&one.seen),
                match times {
                    1 => String::new(),
                    _ => format!(" ({times} times)"),
                }
            )
        })
        .collect();
    let count = lines.len();
    format!(
        "<details class=\"soft\"><summary>observations: {count}</summary><ul>{items}</ul></details>"
    )
}
