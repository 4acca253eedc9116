//! Plan in sentences, for people without technical knowledge. Pure.

use hearthnet_bus::NodeId;
use hearthnet_orchestrator::placement::plan::Unplannable;
use hearthnet_orchestrator::placement::runs_text;
use serde::Serialize;

use super::report::{Advice, NoPlan, Predicted, Report, Row};

/// English words per token, roughly.
const WORDS_PER_TOKEN: f64 = 0.75;

/// Names in a list, at most. Of more, the last ones are counted.
const MAX_NAMES: usize = 4;

/// Plan of a model, as on the page.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Words {
    words: Vec<String>,
    /// A line with numbers for each node.
    details: Vec<String>,
}

impl Words {
    /// Describes a plan, or what is missing for it. `unreachable`: names of the homes that it leaves out
    /// because they cannot be reached. `name` gives the names of nodes.
    pub(crate) fn of(
        plan: &Result<Report, NoPlan>,
        unreachable: &[String],
        name: &dyn Fn(&NodeId) -> String,
    ) -> Self {
        let mut words = Self::of_all(plan, name);
        if !unreachable.is_empty() {
            let names = listed(unreachable);
            words
                .words
                .push(format!("Left out, because away now: {names}."));
        }
        words
    }

    fn of_all(plan: &Result<Report, NoPlan>, name: &dyn Fn(&NodeId) -> String) -> Self {
        match plan {
            Ok(report) => Self {
                words: sentences(report),
                details: report.nodes.iter().map(detail).collect(),
            },
            Err(why) => Self {
                words: missing(why, name),
                details: Vec::new(),
            },
        }
    }
}

fn sentences(report: &Report) -> Vec<String> {
    let (computing, others): (Vec<&Row>, Vec<&Row>) = report
        .nodes
        .iter()
        .partition(|row| !row.computes.is_empty());
    let private = count(&report.private_layers);
    let total = computing
        .iter()
        .map(|row| count(&row.computes))
        .fold(private, u32::saturating_add);
    let mut said = vec![format!("{}.", shares(&computing, total))];
    if private > 0 {
        let share = share(private, total);
        said.push(format!("The computer that asks runs {share} itself."));
    }
    let begin = seconds(report.speed.first_token_ms);
    let pace_here = pace(&report.speed);
    said.push(format!(
        "An answer here would come at {pace_here}, and begin {begin} after a long question."
    ));
    said.push(match (&report.alone, report.advice) {
        (Some(alone), Advice::Alone) => format!(
            "This computer alone would be at least as fast: {}.",
            pace(alone)
        ),
        (Some(alone), _) => format!("This computer alone would be slower: {}.", pace(alone)),
        (None, _) => "This computer alone has too little memory for the model.".to_owned(),
    });
    if report.advice == Advice::FewerNodes {
        let names = names(&others);
        said.push(format!("Answers would not be faster with {names}."));
    }
    said.push(match count(&report.held_twice) {
        0 => "No part would be held twice: while a home is away, its part is missing.".to_owned(),
        twice => format!(
            "{} would be held twice, so that it is still there when a home leaves.",
            share(twice, total)
        ),
    });
    let guessed: Vec<&Row> = report.nodes.iter().filter(|row| !row.is_measured).collect();
    if !guessed.is_empty() {
        said.push(format!(
            "A guess, because not measured yet: {}.",
            names(&guessed)
        ));
    }
    if !report.not_counted.is_empty() {
        let names = listed(&report.not_counted);
        said.push(format!(
            "Not counted, because away or not measured yet: {names}."
        ));
    }
    if !report.convicted.is_empty() {
        let names = listed(&report.convicted);
        said.push(format!("Left out, because of wrong answers: {names}."));
    }
    said
}

/// Shares of the computing nodes: `Ana would run 60 % of the model and Kim 40 %`.
fn shares(computing: &[&Row], total: u32) -> String {
    let parts = computing.iter().enumerate().map(|(at, row)| {
        let part = count(&row.computes);
        match at {
            0 if part == total => format!("{} would run all of the model", row.name),
            0 => format!("{} would run {} of the model", row.name, share(part, total)),
            _ => format!("{} {}", row.name, share(part, total)),
        }
    });
    listed(&parts.collect::<Vec<String>>())
}

/// Reason that there is no plan, and what would help.
fn missing(why: &NoPlan, name: &dyn Fn(&NodeId) -> String) -> Vec<String> {
    let texts: &[&str] = match why {
        NoPlan::NodeNotMeasured => &[
            "There is no plan yet: this computer has not measured itself. It does so within a few minutes, while it is not answering.",
        ],
        NoPlan::ModelNotMeasured => &[
            "There is no plan yet: no home has measured this model. A home does so when it has fetched a part of it.",
        ],
        NoPlan::Impossible {
            why:
                Unplannable::Memory {
                    needed,
                    given,
                    on,
                    more,
                    new_node,
                },
            callers_part,
            models,
        } => {
            // More memory of a home is shared as well.
            let whole = |share: u64| size(share.saturating_mul((*models).max(1)));
            return vec![
                format!(
                    "The model does not fit: its parts need {} of memory, and the homes give {}{}.",
                    size(*needed),
                    size(*given),
                    match models {
                        0 | 1 => String::new(),
                        _ => format!(", because {models} models share their memory equally"),
                    }
                ),
                format!(
                    "One more home that gives {} would be enough, or {} more from {}.",
                    whole(new_node.saturating_add(*callers_part)),
                    whole(*more),
                    name(on)
                ),
                "A home gives half of its free memory, unless its owner chose otherwise."
                    .to_owned(),
            ];
        }
        NoPlan::Impossible {
            why: Unplannable::NoMachine,
            ..
        } => &["There is no plan: no home computes for the others yet."],
        NoPlan::Impossible { .. } => &["There is no plan: this model cannot be split."],
        NoPlan::NotIncluded => {
            &["There is no plan for this computer, because it is not among the homes of the plan."]
        }
    };
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn detail(row: &Row) -> String {
    let held = match row.layers {
        Some(layers) => format!("holds layers {}", runs_text(&[layers])),
        None => "holds no layers".to_owned(),
    };
    let runs = match row.computes.as_slice() {
        [] => "runs none".to_owned(),
        runs => format!("runs {}", runs_text(runs)),
    };
    format!(
        "{}: {held}, {runs}; {} of {} of memory; {:.1} ms per layer; there {:.0} % of the time",
        row.name,
        size(row.memory_bytes),
        size(row.given_bytes),
        f64::from(row.layer_us) / 1e3,
        f64::from(row.online_permille) / 10.0,
    )
}

/// Number of layers in inclusive ranges.
fn count(runs: &[(u32, u32)]) -> u32 {
    let lengths = runs
        .iter()
        .map(|(lo, hi)| hi.saturating_sub(*lo).saturating_add(1));
    lengths.fold(0, u32::saturating_add)
}

/// Share of the layers in per cent, at least 1.
fn share(part: u32, total: u32) -> String {
    let total = u64::from(total.max(1));
    let percent = (u64::from(part) * 100 + total / 2) / total;
    format!("{} %", percent.max(1))
}

/// Speed in words per second, or seconds per word.
fn pace(speed: &Predicted) -> String {
    let words = speed.tokens_per_second * WORDS_PER_TOKEN;
    if words >= 1.5 {
        format!("about {words:.0} words per second")
    } else if words > 2.0 / 3.0 {
        "about one word per second".to_owned()
    } else {
        format!("about one word every {:.0} seconds", 1.0 / words.max(1e-6))
    }
}

fn seconds(ms: f64) -> String {
    match ms / 1e3 {
        s if s < 1.5 => "about a second".to_owned(),
        s if s < 90.0 => format!("about {s:.0} seconds"),
        s => format!("about {:.0} minutes", s / 60.0),
    }
}

/// Size in decimal units, rounded up.
fn size(bytes: u64) -> String {
    let mb = bytes.div_ceil(1_000_000);
    if mb < 1000 {
        return format!("{mb} MB");
    }
    let tenths = mb.div_ceil(100);
    format!("{}.{} GB", tenths / 10, tenths % 10)
}

fn names(rows: &[&Row]) -> String {
    let names: Vec<String> = rows.iter().map(|row| row.name.clone()).collect();
    listed(&names)
}

/// `Ana`, `Ana and Kim`, `Ana, Kim, Lee and 3 more`.
fn listed(all: &[String]) -> String {
    let shown = match all.len() <= MAX_NAMES {
        true => all.len(),
        false => MAX_NAMES - 1,
    };
    let (shown, left_out) = all.split_at(shown);
    let mut texts = shown.to_vec();
    if !left_out.is_empty() {
        texts.push(format!("{} more", left_out.len()));
    }
    match texts.pop() {
        Some(last) if texts.is_empty() => last,
        Some(last) => format!("{} and {last}", texts.join(", ")),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{caller, machine, name, report};
    use super::*;

    fn words(plan: &Result<Report, NoPlan>) -> String {
        Words::of(plan, &[], &name).words.join(" ")
    }

    #[test]
    fn a_split_model_is_told_in_shares_and_words_per_second() {
        let mut found = report(vec![
            caller(4, 1_000),
            machine(2, 6, 500),
            machine(3, 9, 4_000),
        ])
        .unwrap();
        found.nodes[2].is_measured = false;
        found.not_counted = vec!["home 4".to_owned()];
        let found = Ok(found);
        let said = words(&found);
        // In the order of the layers, which is that of the ids.
        let orders = [
            "home 1 would run 33 % of the model and home 2 50 %.",
            "home 2 would run 50 % of the model and home 1 33 %.",
        ];
        assert!(orders.iter().any(|shares| said.contains(shares)), "{said}");
        for part in [
            "The computer that asks runs 17 % itself.",
            // 85.7 tokens per second.
            "at about 64 words per second, and begin about a second after",
            "This computer alone has too little memory",
            "not be faster with home 3.",
            "75 % would be held twice",
            "not measured yet: home 3.",
            "away or not measured yet: home 4.",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let away = ["home 5".to_owned()];
        let told = Words::of(&found, &away, &name);
        let last = told.words.last().map(String::as_str);
        assert_eq!(last, Some("Left out, because away now: home 5."));
        let details = told.details;
        assert_eq!(details.len(), 3);
        assert!(
            details[2].starts_with("home 3: holds layers "),
            "{details:?}"
        );
        assert!(details[2].contains(", runs none; "), "{details:?}");
    }

    #[test]
    fn a_computer_that_is_fast_enough_alone_is_told_so() {
        let said = words(&report(vec![caller(10, 500), machine(2, 10, 480)]));
        assert!(
            said.contains("alone would be at least as fast: about"),
            "{said}"
        );
        let said = words(&report(vec![caller(10, 9_000), machine(2, 10, 100)]));
        assert!(
            said.contains("home 2 would run 83 % of the model."),
            "{said}"
        );
        assert!(
            said.contains("alone would be slower: about 7 words"),
            "{said}"
        );
    }

    #[test]
    fn missing_memory_and_measurements_are_told_with_what_helps() {
        let said = words(&report(vec![caller(3, 1_000), machine(2, 3, 500)]));
        for part in [
            "need 1.1 GB of memory, and the homes give 630 MB.",
            "One more home that gives 839 MB would be enough, or 420 MB more from home",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let why = report(vec![caller(3, 1_000), machine(2, 3, 500)]);
        let said = words(&why.map_err(|why| why.among(2)));
        for part in [
            "the homes give 630 MB, because 2 models share their memory equally.",
            "One more home that gives 1.7 GB would be enough, or 839 MB more from home",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(words(&Err(NoPlan::NodeNotMeasured)).contains("has not measured itself"));
        assert!(words(&Err(NoPlan::ModelNotMeasured)).contains("no home has measured"));
    }

    #[test]
    fn slow_answers_are_told_in_seconds_per_word() {
        let pace = |tokens_per_second| {
            pace(&Predicted {
                tokens_per_second,
                first_token_ms: 0.0,
            })
        };
        assert_eq!(pace(8.0), "about 6 words per second");
        assert_eq!(pace(1.0), "about one word per second");
        assert_eq!(pace(0.2), "about one word every 7 seconds");
        assert!(pace(0.0).ends_with("seconds"));
        assert_eq!(seconds(200.0), "about a second");
        assert_eq!(seconds(4_200.0), "about 4 seconds");
        assert_eq!(seconds(90_000.0), "about 2 minutes");
    }

    #[test]
    fn long_lists_of_names_are_cut() {
        let list = |n: usize| {
            let names: Vec<String> = ["Ana", "Kim", "Lee", "Mo", "Pat"].map(str::to_owned).into();
            listed(&names[..n])
        };
        assert_eq!(list(0), "");
        assert_eq!(list(1), "Ana");
        assert_eq!(list(4), "Ana, Kim, Lee and Mo");
        assert_eq!(list(5), "Ana, Kim, Lee and 2 more");
    }
}
