//! Hosts that can return to some positions only, as with recurrent layers.

use super::*;

const KNOWS: &str = "puppet/1 fork/1 truncate/1";
/// Position to which the sequences of these tests return.
const BACK: u32 = 100;

fn text() -> Vec<u32> {
    (0..150).map(|n| n * 37 % 101).collect()
}

/// The first rows of [`text`], and others behind them.
fn other_text() -> Vec<u32> {
    [&text()[..BACK as usize], &[7, 8, 9]].concat()
}

/// Two exact hosts for each half.
fn halves(software: &'static str) -> Stage {
    Stage::with_software(&HALVES.map(|range| (range, ARITHMETIC)), software)
}

/// Runs rows. Returns the output, and the codes of hosts that failed.
fn run_from(
    stage: &Stage,
    backend: &mut ShardedBackend,
    position: u32,
    values: &[u32],
) -> (u32, Vec<Code>) {
    let mut degraded = Vec::new();
    let mut run = Run {
        cancel: &stage.cancel,
        notify: &mut |frame| {
            if let Frame::ShardStatus { status, code, .. } = frame
                && status == "degraded"
            {
                degraded.extend(code);
            }
        },
    };
    let out = run_rows(backend, position, &rows(values), &mut run).unwrap();
    (out[0] as u32, degraded)
}

/// Runs [`text`], calls `then`, and returns to [`BACK`] for [`other_text`]. Its output must be that
/// of a sequence that never went back. Returns the codes of hosts that failed.
fn go_back(
    stage: &Stage,
    backend: &mut ShardedBackend,
    then: impl FnOnce(&ShardedBackend),
) -> Vec<Code> {
    backend.begin_call(0);
    let (_, degraded) = run_from(stage, backend, 0, &text());
    assert_eq!(degraded, [""; 0]);
    backend.end_call();
    for host in &stage.hosts {
        host.state().received.clear();
    }
    then(backend);
    backend.begin_call(0);
    let (output, degraded) = run_from(stage, backend, BACK, &other_text()[BACK as usize..]);
    assert_eq!([output], undisturbed(&[(&other_text(), 0)])[..]);
    backend.end_call();
    degraded
}

/// Position of the first row that a host received, and number of rows.
fn received(host: &Puppet) -> (u32, usize) {
    let received = &host.state().received;
    let bytes: usize = received.iter().map(|(_, rows, _)| rows.len()).sum();
    (received[0].0, bytes / (WIDTH * size_of::<f32>()))
}

#[test]
fn a_host_that_kept_less_gets_the_difference_and_the_others_do_not() {
    let ranges = [((0, 1), ARITHMETIC), ((2, 3), ARITHMETIC)];
    let stage = Stage::with_software(&ranges, KNOWS);
    // They keep 64 positions and none, of 100.
    stage.hosts[0].state().checkpoints = Some(64);
    stage.hosts[1].state().checkpoints = Some(128);
    let mut backend = stage.open_with(in_pieces_of(24)).unwrap();
    assert_eq!(go_back(&stage, &mut backend, |_| {}), [""; 0]);
    assert_eq!(received(&stage.hosts[0]), (64, 36 + 3));
    assert_eq!(received(&stage.hosts[1]), (0, 100 + 3));
    for host in &stage.hosts {
        assert_eq!(host.state().opened, 1);
    }
    stage.all_are_good();
}

#[test]
fn hosts_without_checkpoints_keep_what_they_are_asked_to() {
    let stage = halves(KNOWS);
    let mut backend = stage.open_with(in_pieces_of(24)).unwrap();
    assert_eq!(go_back(&stage, &mut backend, |_| {}), [""; 0]);
    for span in 0..2 {
        assert_eq!(received(stage.runs(&backend, span)), (BACK, 3));
    }
}

#[test]
fn a_host_that_kept_less_gets_all_rows_again_if_the_caller_dropped_the_history() {
    let ranges = [((0, 1), ARITHMETIC), ((2, 3), ARITHMETIC)];
    let stage = Stage::with_software(&ranges, KNOWS);
    stage.hosts[1].state().checkpoints = Some(64);
    let settings = PumpSettings {
        history_bytes: 0,
        ..in_pieces_of(24)
    };
    let mut backend = stage.open_with(settings).unwrap();
    assert_eq!(go_back(&stage, &mut backend, |_| {}), [""; 0]);
    // The first host returns the rows for the second one again.
    for host in &stage.hosts {
        assert_eq!(host.state().opened, 2);
    }
    stage.all_are_good();
}

#[test]
fn a_host_that_does_not_answer_truncations_gets_all_rows_again() {
    let ranges = [((0, 1), ARITHMETIC), ((2, 3), ARITHMETIC)];
    let stage = Stage::with_software(&ranges, "puppet/1 fork/1");
    stage.hosts[0].state().checkpoints = Some(64);
    stage.hosts[1].state().checkpoints = Some(64);
    let mut backend = stage.open_with(in_pieces_of(24)).unwrap();
    // Its stream ends with `position_gap`, which is no failure.
    let degraded = go_back(&stage, &mut backend, |_| {});
    assert_eq!(degraded, [""; 0]);
    for host in &stage.hosts {
        assert_eq!(received(host), (0, 100 + 3));
    }
}

#[test]
fn a_host_that_claims_impossible_positions_is_left_and_costs_no_row() {
    let lies: [fn(&mut Truncated); 4] = [
        |answer| answer.position = BACK + 1,
        |answer| answer.position = u32::MAX,
        // Neither the position nor a checkpoint.
        |answer| answer.position = BACK - 1,
        |answer| answer.position = 1,
    ];
    for lie in lies {
        for span in 0..2 {
            let stage = halves(KNOWS);
            let mut backend = stage.open_with(in_pieces_of(24)).unwrap();
            let liar = stage.runs(&backend, span).node();
            stage.host(&liar).state().misstates = Some(lie);
            let degraded = go_back(&stage, &mut backend, |_| {});
            assert_eq!(degraded, ["protocol_state"]);
            assert_ne!(stage.runs(&backend, span).node(), liar);
        }
    }
}

#[test]
fn an_answer_to_a_truncation_that_was_not_requested_ends_the_session() {
    let stage = halves(KNOWS);
    let mut backend = stage.open_with(in_pieces_of(24)).unwrap();
    let liar = stage.runs(&backend, 1).node();
    stage.host(&liar).state().babbles = true;
    backend.begin_call(0);
    let (output, degraded) = run_from(&stage, &mut backend, 0, &text());
    assert_eq!(degraded, ["protocol_state"]);
    assert_eq!([output], undisturbed(&[(&text(), 0)])[..]);
    assert_ne!(stage.runs(&backend, 1).node(), liar);
}

#[test]
fn a_host_that_never_answers_a_truncation_is_replaced() {
    let stage = halves(KNOWS);
    let settings = PumpSettings {
        health_timeout: Duration::from_secs(1),
        ..in_pieces_of(24)
    };
    let mut backend = stage.open_with(settings).unwrap();
    let silent = stage.runs(&backend, 0).node();
    stage.host(&silent).state().ignores_truncation = true;
    let degraded = go_back(&stage, &mut backend, |_| {});
    assert_eq!(degraded.len(), 1);
    assert_ne!(stage.runs(&backend, 0).node(), silent);
}

#[test]
fn a_host_may_die_leave_or_preempt_while_others_return() {
    for deed in [Deed::Die, Deed::Leave, Deed::Preempt] {
        for span in 0..2 {
            for position in [64, BACK] {
                let stage = halves(KNOWS);
                for host in &stage.hosts {
                    host.state().checkpoints = Some(64);
                }
                let mut backend = stage.open_with(in_pieces_of(24)).unwrap();
                let degraded = go_back(&stage, &mut backend, |backend| {
                    stage.runs(backend, span).at(position, deed);
                });
                let failures = usize::from(deed == Deed::Die);
                assert_eq!(degraded.len(), failures, "{deed:?} of {span} at {position}");
            }
        }
    }
}
