//! Three households on one network, set up as by a new user: no address and no key is ever typed.
//! "Step by step" in docs/community.md is this walk-through.
//!
//! Each household is a network namespace on one bridge, with the real program, a data directory and
//! a configuration of its own. Where the machine forbids namespaces, the reason is printed and the
//! test is skipped. It prints its measurements:
//!
//! ```text
//! cargo test -p hearthnet --test program -- at_home:: --nocapture
//! ```

use std::process::{Output, Stdio};
use std::time::Instant;

use hearthnet_testkit::lab::{Host, Lab};
use serde_json::Value;

use crate::support::*;

const QUESTION: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";

/// Half of the layers fit, so that two hosts are needed: all 30 take about 63 MiB.
const MEMORY: &str = "research.distributed_inference.host.memory_budget_mb=40";

/// Household: a machine of the lab with a user's home on it.
struct Household {
    name: &'static str,
    host: Host,
    home: Home,
}

impl Household {
    fn new(host: &Host, name: &'static str) -> Self {
        Self {
            name,
            host: host.clone(),
            home: Home::on(host),
        }
    }

    /// Joins with a code, with a wait: the admitting node may just have started.
    fn join(&self, code: &str) {
        self.home.says(&["community", "join", code.trim()]);
    }

    /// Starts `serve --layers auto` and returns when it is ready; it loads layers later.
    fn serve(&self) -> Running {
        let model = model();
        let little = ["--set", MEMORY, "--set", "engine.threads=1"];
        let serve = ["serve", "--model", model, "--layers", "auto"];
        let tail = ["--json", "--lifeline"];
        let mut command = self.home.hearthnet(&[&little[..], &serve, &tail].concat());
        let mut serving = Running::start(command.stdin(Stdio::piped()));
        let ready = serving.lines.next();
        assert!(ready.is_some(), "{}: {}", self.name, serving.complaint());
        serving
    }

    fn start(&self, args: &[&str]) -> Running {
        Running::start(&mut self.home.hearthnet(args))
    }

    /// Asks the question with flags that make answers comparable.
    fn chat(&self, extra: &[&str]) -> Output {
        self.home.run(&chat(extra))
    }

    /// Repeats the question until it succeeds. Returns the whole answer.
    fn chat_until_answered(&self, extra: &[&str]) -> String {
        text(&until_answered(|| self.chat(extra)).stdout)
    }
}

fn chat<'a>(extra: &[&'a str]) -> Vec<&'a str> {
    let ask = ["chat", QUESTION, "--model", model()];
    [&ask[..], &["--temperature", "0.8", "--seed", "7"], extra].concat()
}

/// Whether another token arrives before the end.
fn token(chat: &mut Running) -> bool {
    let mut lines = chat.lines.by_ref().map(|line| line.expect("a pipe"));
    lines.any(|line| line.contains("token_delta"))
}

/// Missing layers of the only model, as a household sees it. `None`: it knows no model.
fn missing(household: &Household) -> Option<Vec<Value>> {
    let status = household.home.json(&["status", "--json"]);
    let models = status["models"].as_array().expect("models").clone();
    let model = models.first()?;
    Some(model["missing_layers"].as_array().expect("ranges").clone())
}

#[test]
fn three_households_answer_together_without_an_address_typed() {
    let Some(lab) = Lab::or_skip(3, 1) else {
        return;
    };
    let attic = Household::new(lab.host(0), "attic");
    let bakery = Household::new(lab.host(1), "bakery");
    let cellar = Household::new(lab.host(2), "cellar");

    for household in [&attic, &bakery, &cellar] {
        household
            .home
            .says(&["init", "--research", "--name", household.name]);
    }
    // Reference answer, byte for byte.
    let alone = text(&cellar.chat(&["--local"]).stdout);
    assert!(alone.len() > 40, "{alone:?}");

    attic.home.says(&["community", "create", "Elm Street"]);
    let attic_serves = attic.serve();
    let code = attic
        .home
        .says(&["community", "invite", "--level", "trusted"]);
    bakery.join(&code);
    let code = attic.home.says(&["community", "invite"]);
    cellar.join(&code);
    // A used code is refused.
    let late = Household::new(lab.host(2), "late");
    let again = late
        .home
        .run(&["community", "join", "--wait", "5s", code.trim()]);
    assert!(!again.status.success(), "{}", text(&again.stdout));
    assert_complains(&again, "used up");

    let started = Instant::now();
    let bakery_serves = bakery.serve();
    let found = until("attic hears of the bakery's layers", || {
        missing(&attic).is_some_and(|missing| missing.is_empty())
    });
    eprintln!(
        "a second host is ready after {:?}, and known to the first {found:?} later",
        started.elapsed() - found
    );

    // No address and no key is given.
    let start = Instant::now();
    let answer = cellar.chat_until_answered(&["--no-fallback"]);
    eprintln!(
        "the first question is answered {:?} after it was asked",
        start.elapsed()
    );
    assert_eq!(answer, alone);

    // Homes that serve layers can ask too, and their own layers count.
    for household in [&attic, &bakery] {
        let answer = household.chat_until_answered(&["--no-fallback"]);
        assert_eq!(answer, alone);
        let done = household.home.json(&chat(&["--json"]));
        assert_eq!(format!("{}\n", done["text"].as_str().expect("text")), alone);
        let route = done["route"].as_array().expect("a route");
        let away = route.iter().filter(|hop| hop["host"].is_string()).count();
        assert!(away >= 1 && away < route.len(), "{done:#}");
    }

    the_cable(&bakery, &cellar, &alone);
    drop((attic_serves, bakery_serves));
    let serving = from_cold(&attic, &bakery, &cellar);
    revoked_mid_stream(&attic, &cellar);
    drop(serving);
}

/// Without the bakery layers are missing, and the chat names them; with it, all is well again.
fn the_cable(bakery: &Household, cellar: &Household, alone: &str) {
    bakery.host.unplug(0);
    let output = cellar.chat(&["--no-fallback", "--json"]);
    assert_fails(&output, 4, "shard_unavailable");
    let why = text(&output.stderr);
    assert!(why.contains("bakery") && why.contains("layers"), "{why}");
    eprintln!("with the bakery's cable pulled: {}", why.trim());
    // `--local` still answers meanwhile.
    assert_eq!(text(&cellar.chat(&["--local"]).stdout), alone);
    bakery.host.plug(0);
    let start = Instant::now();
    let answer = cellar.chat_until_answered(&["--no-fallback"]);
    eprintln!(
        "answered together again {:?} after the cable was plugged in",
        start.elapsed()
    );
    assert_eq!(answer, alone);
}

/// Starts everything at once and measures the time to the first token.
fn from_cold(attic: &Household, bakery: &Household, cellar: &Household) -> (Running, Running) {
    let args = chat(&["--no-fallback", "--frames", "--max-tokens", "1"]);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let attic = scope.spawn(|| (attic.serve(), start.elapsed()));
        let bakery = scope.spawn(|| (bakery.serve(), start.elapsed()));
        let mut questions = 0;
        until("a first token", || {
            questions += 1;
            token(&mut cellar.start(&args))
        });
        let first = start.elapsed();
        let (attic, attic_after) = attic.join().expect("it serves");
        let (bakery, bakery_after) = bakery.join().expect("it serves");
        eprintln!(
            "cold community, all started at once: first token after {first:?}, with question {questions} (the hosts served after {attic_after:?} and {bakery_after:?})"
        );
        (attic, bakery)
    })
}

/// A member that is revoked during an answer gets no more of it.
fn revoked_mid_stream(attic: &Household, cellar: &Household) {
    let id = cellar.home.node_id();
    let args = chat(&["--no-fallback", "--frames"]);
    // Slows the line down, so that the answer takes longer than the command.
    cellar.host.bandwidth(0, 1);
    let mut asking = cellar.start(&args);
    let mut tokens = 5;
    for _ in 0..tokens {
        assert!(token(&mut asking), "{}", asking.complaint());
    }
    attic.home.says(&["community", "revoke", &id]);
    let revoked = Instant::now();
    let mut last = revoked;
    for line in asking.lines.by_ref() {
        let line = line.expect("a pipe");
        if line.contains("token_delta") {
            tokens += 1;
            last = Instant::now();
        }
        assert!(!line.contains("\"done\""), "the answer went on to its end");
    }
    let why = asking.complaint();
    eprintln!(
        "revoked: the last token came {:?} after the command, and the program ended after {:?} with {tokens} tokens: {why}",
        last.duration_since(revoked),
        revoked.elapsed()
    );
    assert_ne!(asking.status(), Some(0));
    let after = cellar.chat(&["--no-fallback", "--max-tokens", "1", "--json"]);
    assert!(!after.status.success(), "{}", text(&after.stdout));
    assert_complains(&after, "revoked");
}
