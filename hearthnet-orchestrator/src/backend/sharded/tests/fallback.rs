//! Answers that go on with other hosts or with this machine, and their arithmetics.

use super::*;

/// Arithmetic other than the exact one. Here it gives the same results.
const OTHER: &str = "torch-cpu-fp32";

/// Call whose first host fails at a position, when a spare becomes available; 8 is the first row
/// after the prompt. Arithmetics of the first half, of its spare, and of the second half.
fn with_spare(
    [first, spare, second]: [&'static str; 3],
    exact: Exact,
    at: u32,
) -> (Result<(), ChatError>, Heard) {
    let mut stage = Stage::of(&[((0, 1), first), ((2, 3), second), ((0, 1), spare)]);
    stage.exact = exact;
    let host = &stage.hosts[0];
    host.at(at, Deed::Die);
    // The spare has no room when the sequence begins.
    stage.hosts[2].state().refusals = vec!["kv_full"];
    let mut backend = stage.open();
    stage.hosts[2].state().refusals.clear();
    assert_eq!(stage.runs(&backend, 0).node(), host.node());
    let mut heard = Heard::default();
    let result = stage.call(&mut backend, &PROMPT, 12, &mut heard);
    (result, heard)
}

/// The host of all layers preempts a stream in the middle of an answer, beside a spare.
fn preempted(host: &'static str, spare: &'static str) -> (Result<(), ChatError>, Heard) {
    let mut stage = Stage::of(&[((0, 3), host), ((0, 3), spare)]);
    stage.exact = Exact::Any;
    stage.hosts[1].state().refusals = vec!["kv_full"];
    let mut backend = stage.open();
    stage.hosts[1].state().refusals.clear();
    stage.hosts[0].at(9, Deed::Preempt);
    let mut heard = Heard::default();
    let result = stage.call(&mut backend, &PROMPT, 12, &mut heard);
    assert_eq!(
        stage.runs(&backend, 0).node(),
        stage.hosts[1].node(),
        "the spare goes on"
    );
    (result, heard)
}

#[test]
fn an_answer_goes_on_with_the_arithmetic_that_it_was_begun_with() {
    for host in [ARITHMETIC, OTHER] {
        let spare = if host == ARITHMETIC {
            OTHER
        } else {
            ARITHMETIC
        };
        let of = |name: &str| Arithmetics::from_iter([name.to_owned()]);
        let call = |spare, exact, at| with_spare([host, spare, ARITHMETIC], exact, at);
        // In the middle of the answer, only a spare with the same arithmetic is accepted.
        let (result, heard) = call(host, Exact::Prefer, 9);
        assert_eq!((result, heard.moves.len()), (Ok(()), 1));
        assert_eq!(heard.changes, []);
        let (result, heard) = call(spare, Exact::Prefer, 9);
        assert!(
            matches!(&result, Err(ChatError::ArithmeticMismatch(why)) if why.contains(spare)),
            "{result:?}"
        );
        assert_eq!(heard.moves, []);
        // `Exact::Any` accepts it, and reports the change.
        let (result, heard) = call(spare, Exact::Any, 9);
        assert_eq!((result, heard.moves.len()), (Ok(()), 1));
        assert_eq!(heard.changes, [(of(host), of(spare))]);
        // Nor before the first row of the answer: the second half holds KV of its rows.
        let (result, _) = call(spare, Exact::Prefer, 5);
        assert!(
            matches!(result, Err(ChatError::ArithmeticMismatch(_))),
            "{result:?}"
        );
        let (result, heard) = call(spare, Exact::Any, 5);
        assert_eq!((result, heard.moves.len()), (Ok(()), 1));
        assert_eq!(heard.changes, [(of(host), of(spare))]);
        // A preemption reports the change as well.
        let (result, heard) = preempted(host, spare);
        assert_eq!(result, Ok(()));
        assert_eq!(heard.moves.len(), 1);
        assert_eq!(heard.moves[0].0, Code::PREEMPTED);
        assert_eq!(heard.changes, [(of(host), of(spare))]);
        let (result, heard) = preempted(host, host);
        assert_eq!((result, heard.moves), (Ok(()), vec![]));
    }
}

#[test]
fn required_exactness_holds_to_the_end() {
    let call = |arithmetics, at| with_spare(arithmetics, Exact::Require, at);
    for at in [2, 9] {
        let (result, heard) = call([ARITHMETIC, ARITHMETIC, ARITHMETIC], at);
        assert_eq!((result, heard.changes), (Ok(()), vec![]));
        let (result, _) = call([ARITHMETIC, OTHER, ARITHMETIC], at);
        assert!(
            matches!(&result, Err(ChatError::ArithmeticMismatch(why)) if why.contains(OTHER)),
            "{result:?}"
        );
    }
    let mut stage = Stage::of(&[((0, 1), ARITHMETIC), ((2, 3), OTHER)]);
    stage.exact = Exact::Require;
    let refused = stage.open_with(PumpSettings::default()).err();
    assert!(matches!(refused, Some(ChatError::ArithmeticMismatch(_))));
    // A full host is not a missing one: the sequence waits for it.
    let mut stage = Stage::of(&[((0, 3), ARITHMETIC), ((0, 3), OTHER)]);
    stage.exact = Exact::Require;
    stage.hosts[0].state().refusals = vec!["kv_full"; 1000];
    let refused = stage.open_with(PumpSettings {
        start_timeout: Duration::from_millis(200),
        ..PumpSettings::default()
    });
    assert!(matches!(refused.err(), Some(ChatError::HostsFull(_))));
}

/// This machine's layers, with the length of their sequence. Rows must be submitted without gaps.
struct Here(u32);

fn here() -> LoadLocal {
    Arc::new(|| Ok(Box::new(Here(0)) as Box<dyn Backend>))
}

impl Backend for Here {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        assert_eq!(rows.position, self.0, "a hole");
        self.0 += (rows.values.len() / WIDTH) as u32;
        std::future::ready(()).boxed_local()
    }

    fn output<'a>(&'a mut self, _: &'a mut Run<'_>) -> Output<'a> {
        std::future::ready(Ok(row(self.0).to_vec())).boxed_local()
    }

    fn route(&self) -> Vec<RouteHop> {
        vec![RouteHop {
            shard_id: "puppet:0-3".into(),
            host: None,
            endpoint: None,
            layers: (0, 3),
            memory_mb: 0,
            arithmetic: ARITHMETIC.into(),
            policy: "".into(),
        }]
    }
}

#[test]
fn a_fallback_completes_exact_answers_and_refuses_others() {
    for (arithmetic, exact, at, goes_on) in [
        (ARITHMETIC, Exact::Prefer, 9, true),
        (ARITHMETIC, Exact::Require, 9, true),
        (OTHER, Exact::Prefer, 9, false),
        (OTHER, Exact::Prefer, 2, true),
        (OTHER, Exact::Any, 9, true),
    ] {
        let case = format!("{arithmetic} {exact:?} {at}");
        let mut stage = Stage::of(&[((0, 3), arithmetic)]);
        stage.exact = exact;
        stage.hosts[0].at(at, Deed::Die);
        let mut backend = stage.with_fallback(Ok(stage.open()), here());
        let (result, moves) = stage.failovers(&mut backend, 4);
        match goes_on {
            true => assert!(result.is_ok(), "{case}: {result:?}"),
            false => assert!(
                matches!(result, Err(ChatError::ArithmeticMismatch(_))),
                "{case}: {result:?}"
            ),
        }
        // All rows of an answer that has not begun are computed here.
        let changed = goes_on && arithmetic == OTHER && at > 8;
        let changes = moves.iter().filter(|(is_change, _)| *is_change);
        assert_eq!(changes.count(), usize::from(changed), "{case}");
    }
}

#[test]
fn giving_up_does_not_wait_until_this_machine_has_loaded_the_model() {
    let stage = Stage::new(&[(0, 3)]);
    stage.hosts[0].at(2, Deed::Die);
    let (loading, begun) = std::sync::mpsc::channel();
    let (told, wait) = std::sync::mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let load = move || {
        loading.send(()).unwrap();
        // Until the test ends.
        let _ = wait.lock().recv();
        Err(ChatError::Cancelled)
    };
    let mut backend = stage.with_fallback(Ok(stage.open()), Arc::new(load));
    std::thread::scope(|scope| {
        let cancel = &stage.cancel;
        let call =
            scope.spawn(move || run_quietly(&mut backend, 0, &rows(&PROMPT), cancel).map(drop));
        begun.recv_timeout(TIMEOUT).unwrap();
        cancel.cancel();
        assert_eq!(call.join().unwrap(), Err(ChatError::Cancelled));
    });
    drop(told);
}

/// Source whose searches for replacements fail for a while.
struct Vain(Connected, Duration);

impl HostSource for Vain {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        if search.before.is_some() {
            std::thread::sleep(self.1);
        }
        self.0.route(search)
    }

    fn choice(&self) -> &Choice {
        self.0.choice()
    }
}

#[test]
fn the_recovery_time_of_a_fallback_includes_the_search_for_hosts() {
    let stage = Stage::new(&[(0, 3)]);
    stage.hosts[0].at(9, Deed::Die);
    let wait = Duration::from_millis(300);
    let connected = Connected {
        links: stage.links.clone(),
        choice: stage.choice(0..LAYERS),
        convicted: Convicted::default(),
    };
    let hosts = stage.open_by(Vain(connected, wait), fallback_settings());
    let mut backend = stage.with_fallback(hosts, here());
    let (result, moves) = stage.failovers(&mut backend, 3);
    result.unwrap();
    let took: Vec<f64> = moves.into_iter().map(|(_, took)| took).collect();
    assert_eq!(took.len(), 1);
    assert!(took[0] >= wait.as_secs_f64() * 1e3, "{took:?}");
}
