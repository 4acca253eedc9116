//! Audits of the scripted hosts.

use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::Finding;

use super::*;
use crate::hosts::health::AuditCounts;

/// A stage on which every span is audited.
fn audited(ranges: &[(u32, u32)]) -> Stage {
    let mut stage = Stage::new(ranges);
    stage.audit_share = 1.0;
    stage
}

impl Stage {
    fn audits(&self, host: &str) -> AuditCounts {
        let known = self.known_of(host);
        known.map(|one| one.audits).unwrap_or_default()
    }

    /// Good for a host that was not used yet.
    fn standing(&self, host: &str) -> Standing {
        let known = self.known_of(host);
        known.map_or(Standing::Good, |one| one.standing)
    }

    /// Sum of all audits.
    fn all_audits(&self) -> (u64, u64, u64) {
        let all = self.health.all().into_iter().map(|one| one.audits);
        all.fold((0, 0, 0), |(a, b, c), one| {
            (a + one.confirmed, b + one.mismatches, c + one.not_auditable)
        })
    }
}

const LIES: [Lie; 3] = [Lie::Noise, Lie::SkipsLayer, Lie::Yesterday];

#[test]
fn audits_of_honest_hosts_confirm_every_answer_however_it_is_cut() {
    for prefill_rows in [1, 3, 24] {
        let stage = audited(&HALVES);
        let mut backend = stage.open_with(in_pieces_of(prefill_rows)).unwrap();
        let hosts = [0, 1].map(|span| stage.runs(&backend, span).node());
        stage.answer(&mut backend, 7);
        stage.until("the first answer is not audited", || {
            hosts.iter().all(|host| stage.audits(host).confirmed > 0)
        });
        stage.ended(&mut backend, &[5, 6, 7], 4);
        stage.until("an answer is not audited", || {
            let is_confirmed = |host: &String| {
                let audits = stage.audits(host);
                audits.confirmed == audits.answers
            };
            hosts.iter().all(is_confirmed)
        });
        assert_eq!(stage.all_audits().1, 0);
        stage.all_are_good();
        drop(backend);
        stage.until_empty();
    }
}

#[test]
fn honest_hosts_are_never_blamed_whenever_one_fails() {
    for span in [0, 1] {
        for (position, deed) in [
            (0, Deed::Die),
            (7, Deed::Preempt),
            (8, Deed::Leave),
            (15, Deed::Die),
        ] {
            // A third host of each half, for the audit.
            let ranges = [
                HALVES[0], HALVES[0], HALVES[0], HALVES[2], HALVES[2], HALVES[2],
            ];
            let stage = audited(&ranges);
            let mut backend = stage.open();
            let node = stage.runs(&backend, span).node();
            stage.host(&node).at(position, deed);
            stage.answer(&mut backend, 12);
            let now = backend.route().into_iter().filter_map(|hop| hop.host);
            let now: Vec<String> = now.collect();
            drop(backend);
            stage.until("the hosts of the end are not audited", || {
                now.iter().all(|host| stage.audits(host).confirmed > 0)
            });
            let (_, mismatches, _) = stage.all_audits();
            assert_eq!(mismatches, 0, "{deed:?} of host {span} at {position}");
            assert_eq!(stage.quarantined(), 0);
        }
    }
}

#[test]
fn a_liar_is_quarantined_by_its_audit_and_the_next_chat_goes_elsewhere() {
    for lie in LIES {
        let mut stage = Stage::new(&[(0, 1), (0, 1), (0, 1), (2, 3)]);
        stage.audit_share = 1.0;
        let mut backend = stage.open();
        let liar = stage.runs(&backend, 0).node();
        stage.host(&liar).state().lies = Some(lie);
        let heard = stage.ended(&mut backend, &PROMPT, 9);
        assert_eq!(heard.degraded, [""; 0], "the checks of rows find nothing");
        stage.until("the liar is not found out", || {
            stage.standing(&liar) == Standing::Quarantined
        });
        let blamed = stage.health.all().into_iter();
        let blamed = blamed.filter(|one| one.standing != Standing::Good).count();
        assert_eq!(blamed, 1, "the liar alone");
        assert_ne!(stage.runs(&stage.open(), 0).node(), liar);
    }
}

#[test]
fn a_liar_among_auditors_is_the_one_that_is_blamed() {
    let stage = audited(&[(0, 1), (0, 1), (0, 1), (2, 3)]);
    let mut backend = stage.open();
    let host = stage.runs(&backend, 0).node();
    let liar = stage.hosts.iter().find(|one| one.node() != host).unwrap();
    liar.state().lies = Some(LIES[0]);
    let mut rounds = 0;
    while stage.all_audits().1 == 0 || stage.standing(&liar.node()) == Standing::Good {
        let before = stage.audits(&host);
        stage.ended(&mut backend, &[5, 6, 7], 2);
        let done = |audits: AuditCounts| (audits.confirmed, audits.mismatches);
        stage.until("an audit is missing", || {
            done(stage.audits(&host)) != done(before)
        });
        rounds += 1;
        assert!(rounds < 50, "the liar is never asked");
    }
    stage.until("the liar is not blamed", || {
        stage.standing(&liar.node()) == Standing::Quarantined
    });
    assert_eq!(stage.standing(&host), Standing::Good);
}

#[test]
fn without_a_third_host_both_are_avoided_and_neither_is_convicted() {
    let stage = audited(&[(0, 1), (0, 1), (2, 3)]);
    let mut backend = stage.open();
    let liar = stage.runs(&backend, 0).node();
    stage.host(&liar).state().lies = Some(LIES[0]);
    stage.ended(&mut backend, &PROMPT, 3);
    for host in &stage.hosts[..2] {
        stage.until("a host is not disputed", || {
            stage.standing(&host.node()) == Standing::Failing
        });
        let failures = stage.health_of(&host.node()).failures;
        assert!(
            failures.contains_key(&FailureKind::Disputed),
            "{failures:?}"
        );
    }
}

#[test]
fn spans_that_no_other_host_holds_count_as_not_auditable() {
    let stage = audited(&[(0, 1), (2, 3), (2, 3)]);
    let mut backend = stage.open();
    stage.answer(&mut backend, 3);
    let host = stage.hosts[0].node();
    stage.until("the span is not drawn", || {
        let audits = stage.audits(&host);
        audits.not_auditable == audits.answers
    });
    assert_eq!(stage.audits(&host).confirmed, 0);
    stage.all_are_good();
}

#[test]
fn an_auditor_gets_the_rows_of_its_layers_and_nothing_else() {
    let stage = audited(&[(0, 1), (2, 3), (2, 3)]);
    let mut backend = stage.open();
    let host = stage.runs(&backend, 1).node();
    stage.answer(&mut backend, 5);
    stage.until("no audit", || stage.audits(&host).confirmed > 0);
    let rows = |host: &Puppet| {
        let mut rows = BTreeMap::new();
        for (position, data, lo) in &host.state().received {
            assert_eq!(*lo, 2);
            let each = data.chunks_exact(4 * WIDTH);
            rows.extend((*position..).zip(each.map(<[u8]>::to_vec)));
        }
        rows
    };
    let [audited, auditor] = match stage.hosts[1].node() == host {
        true => [&stage.hosts[1], &stage.hosts[2]],
        false => [&stage.hosts[2], &stage.hosts[1]],
    };
    assert_eq!(rows(auditor), rows(audited));
}

#[test]
fn a_share_of_zero_audits_nothing() {
    let stage = Stage::new(&HALVES);
    let mut backend = stage.open();
    stage.answer(&mut backend, 5);
    drop(backend);
    stage.until_empty();
    assert_eq!(stage.all_audits(), (0, 0, 0));
}

/// Audits on this machine.
fn here() -> RecomputeHere {
    Arc::new(|layers: Range<u32>, rows: &[f32]| {
        let mut states = vec![Vec::new(); layers.len()];
        let step = step_of(0, rows);
        let mut out = Vec::new();
        let computed = super::run(layers.start, &mut states, step);
        BoundaryDtype::F32.decode(&computed.data, &mut out).unwrap();
        Ok(out)
    })
}

/// Step of all these rows.
fn step_of(position: u32, rows: &[f32]) -> Step {
    let data: Vec<u8> = rows.iter().flat_map(|v| v.to_le_bytes()).collect();
    Step {
        stream: 1,
        epoch: 1,
        position,
        rows: (rows.len() / WIDTH) as u32,
        width: WIDTH as u32,
        dtype: DType::F32,
        want: Want::All,
        data: data.into(),
    }
}

#[test]
fn this_machine_audits_what_no_other_host_holds() {
    for lie in [None, Some(LIES[1])] {
        let mut stage = audited(&[(0, 1), (2, 3)]);
        stage.here = Some(here());
        let mut backend = stage.open();
        let host = stage.hosts[0].node();
        stage.hosts[0].state().lies = lie;
        stage.ended(&mut backend, &PROMPT, 5);
        stage.until("both spans are audited", || {
            let of = |host: &Puppet| stage.audits(&host.node());
            let done = |audits: AuditCounts| audits.confirmed + audits.mismatches > 0;
            stage.hosts.iter().all(|host| done(of(host)))
        });
        stage.until("the liar is not blamed", || match lie {
            Some(_) => stage.standing(&host) == Standing::Quarantined,
            None => stage.audits(&host).confirmed > 0,
        });
        assert_eq!(stage.standing(&stage.hosts[1].node()), Standing::Good);
        assert_eq!(stage.all_audits().2, 0);
    }
}

#[test]
fn this_machine_decides_between_two_hosts() {
    let mut stage = audited(&[(0, 1), (0, 1), (2, 3)]);
    stage.here = Some(here());
    let mut backend = stage.open();
    let host = stage.runs(&backend, 0).node();
    let auditor = stage.hosts.iter().find(|one| one.node() != host).unwrap();
    auditor.state().lies = Some(LIES[0]);
    stage.ended(&mut backend, &PROMPT, 3);
    stage.until("the lying auditor is not blamed", || {
        stage.standing(&auditor.node()) == Standing::Quarantined
    });
    assert_eq!(stage.standing(&host), Standing::Good);
}

#[test]
fn beside_a_convicted_liar_no_host_is_convicted_for_the_rows_of_another_auditor() {
    let mut stage = audited(&[(0, 3), (0, 1), (2, 3)]);
    stage.here = Some(here());
    let mut backend = stage.open();
    let nodes: Vec<String> = stage.hosts.iter().map(|host| host.node()).collect();
    assert_eq!(stage.runs(&backend, 0).node(), nodes[0]);
    // The second host computes the audit with the third one, and is honest.
    stage.hosts[0].state().lies = Some(Lie::SkipsLayer);
    stage.hosts[2].state().lies = Some(Lie::Noise);
    stage.ended(&mut backend, &PROMPT, 3);
    stage.until("the liar is not convicted", || {
        stage.standing(&nodes[0]) == Standing::Quarantined
    });
    for auditor in &nodes[1..] {
        stage.until("an auditor is not disputed", || {
            stage.standing(auditor) != Standing::Good
        });
        let failures = stage.health_of(auditor).failures;
        assert_eq!(
            failures.keys().collect::<Vec<_>>(),
            [&FailureKind::Disputed]
        );
    }
}

/// So small that no span is ever drawn.
const NEVER: f64 = 1e-300;

#[test]
fn the_replay_after_a_failure_is_an_audit_that_needs_no_draw() {
    for (lie, blamed) in [(Some(LIES[0]), 1), (None, 0)] {
        let mut stage = Stage::new(&[(0, 1), (0, 1), (0, 1), (2, 3)]);
        stage.audit_share = NEVER;
        let mut backend = stage.open();
        let failing = stage.runs(&backend, 0).node();
        stage.host(&failing).state().lies = lie;
        stage.host(&failing).at(14, Deed::Preempt);
        // It is preempted for good, so that another host gets its rows.
        stage.host(&failing).state().refusals = vec!["kv_full"; 1000];
        let heard = stage.ended(&mut backend, &PROMPT, 9);
        assert_eq!(heard.degraded, [""; 0]);
        let audits = stage.audits(&failing);
        match lie {
            Some(_) => {
                assert!(audits.mismatches > 0);
                stage.until("the liar is not found out", || {
                    stage.standing(&failing) == Standing::Quarantined
                });
            }
            None => {
                assert_eq!(audits.mismatches, 0);
                assert!(audits.confirmed > 0);
            }
        }
        assert_eq!(stage.quarantined(), blamed);
    }
}

/// All layers on this machine.
struct Local {
    layers: Vec<Vec<u32>>,
    out: Vec<f32>,
    all: bool,
}

impl Backend for Local {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        let step = step_of(rows.position, rows.values);
        BoundaryDtype::F32
            .decode(&run(0, &mut self.layers, step).data, &mut self.out)
            .unwrap();
        self.all = rows.all;
        std::future::ready(()).boxed_local()
    }

    fn output<'a>(&'a mut self, _: &'a mut Run<'_>) -> Output<'a> {
        let mut out = std::mem::take(&mut self.out);
        if !self.all {
            out.drain(..out.len() - WIDTH);
        }
        std::future::ready(Ok(out)).boxed_local()
    }

    fn route(&self) -> Vec<RouteHop> {
        Vec::new()
    }
}

impl Stage {
    /// Runs a call that a host leaves by a refusal that is no failure, so that this machine takes
    /// over.
    fn take_over(&self, leaves: &Puppet) {
        let load: LoadLocal = Arc::new(|| {
            Ok(Box::new(Local {
                layers: vec![Vec::new(); LAYERS as usize],
                out: Vec::new(),
                all: false,
            }) as Box<dyn Backend>)
        });
        let hosts = self.open_with(PumpSettings {
            room_timeout: Duration::from_millis(100),
            ..fallback_settings()
        });
        leaves.at(12, Deed::Preempt);
        leaves.state().refusals = vec!["kv_full"; 1000];
        let mut backend = self.with_fallback(hosts, load);
        let (result, _) = self.failovers(&mut backend, 6);
        // The answer is one row, as it was before the hosts failed.
        assert_eq!(result.unwrap().len(), WIDTH);
    }
}

#[test]
fn this_machine_compares_when_it_takes_over() {
    // In the last case the next host must see the difference.
    for (ranges, lie, blame) in [
        (&[(0, 3)][..], None, None),
        (&[(0, 3)], Some(LIES[0]), Some(FailureKind::Corruption)),
        (
            &[(0, 1), (2, 3)],
            Some(LIES[1]),
            Some(FailureKind::Disputed),
        ),
    ] {
        let mut stage = Stage::new(ranges);
        stage.audit_share = NEVER;
        let liar = &stage.hosts[0];
        liar.state().lies = lie;
        stage.take_over(liar);
        let told = stage.health_of(&liar.node());
        let failed = |kind| told.failures.contains_key(&kind);
        assert_eq!(
            failed(FailureKind::Corruption),
            blame == Some(FailureKind::Corruption)
        );
        assert_eq!(
            failed(FailureKind::Disputed),
            blame == Some(FailureKind::Disputed)
        );
        match lie {
            None => assert!(told.audits.confirmed > 0 && told.audits.mismatches == 0),
            Some(_) => assert!(stage.all_audits().1 > 0),
        }
    }
}

/// Evidence of an audit in which these of the two hosts of the first layers lie.
fn evidence_of(here: Option<RecomputeHere>, ranges: &[(u32, u32)], liars: [bool; 2]) -> Evidence {
    let mut stage = audited(ranges);
    stage.here = here;
    let found = evidence_on(&stage);
    let mut backend = stage.open();
    let host = stage.runs(&backend, 0).node();
    for one in &stage.hosts {
        let is_liar = match one.node() == host {
            true => liars[0],
            false => liars[1] && one.lo == 0,
        };
        one.state().lies = is_liar.then_some(LIES[0]);
    }
    stage.ended(&mut backend, &PROMPT, 5);
    let evidence = found.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(evidence.accused.statement.host.to_string(), host);
    evidence
}

#[test]
fn the_evidence_of_a_mismatch_convicts_the_liar_and_no_other_host() {
    let (alone, two) = (&[(0, 1), (2, 3)][..], &[(0, 1), (0, 1), (2, 3)][..]);
    for (computes, ranges, liars, finding) in [
        (true, alone, [true, false], Finding::Accused),
        (false, two, [true, false], Finding::Accused),
        (false, two, [false, true], Finding::Witness),
        (true, two, [false, true], Finding::Witness),
    ] {
        let evidence = evidence_of(computes.then(here), ranges, liars);
        assert_eq!(evidence.witness.is_some(), ranges.len() > 2);
        let dispute = evidence.dispute([1; 32], 1);
        let accuser = caller_key().id();
        assert_eq!(evidence.check(&accuser, &dispute, ARITHMETIC), Ok(()));
        assert_eq!(judged(&evidence), finding, "{liars:?}");
    }
}

/// Finding of a judge, which computes the layers.
fn judged(evidence: &Evidence) -> Finding {
    let mut values = Vec::new();
    BoundaryDtype::F32
        .decode(&evidence.rows, &mut values)
        .unwrap();
    let computed = here()(0..2, &values).unwrap();
    let mut rows = Vec::new();
    BoundaryDtype::F32.encode(&computed, &mut rows);
    evidence.finding(&rows, 4 * WIDTH)
}

#[test]
fn an_auditor_that_lies_and_leaves_harms_neither_the_host_nor_the_accuser() {
    for deed in [Deed::Preempt, Deed::Leave, Deed::Die] {
        let stage = audited(&[(0, 1), (0, 1), (0, 1), (0, 1), (2, 3)]);
        let found = evidence_on(&stage);
        // The audit takes several steps.
        let mut backend = stage.open();
        let host = stage.runs(&backend, 0).node();
        let others = stage
            .hosts
            .iter()
            .filter(|one| one.lo == 0 && one.node() != host);
        for liar in others.skip(1) {
            liar.state().lies = Some(LIES[0]);
            liar.at(5, deed);
        }
        stage.ended(&mut backend, &PROMPT, 5);
        stage.until("the host is not audited", || {
            let audits = stage.audits(&host);
            audits.confirmed + audits.mismatches > 0
        });
        stage.until("another audit is under way", || {
            stage.audits(&stage.hosts[4].node()).not_auditable > 0
        });
        // A leaving host may return all rows before it is replaced. One that preempts does so once:
        // if that was when it took over from another auditor, the next route may begin with it, and it
        // returns all rows. Its evidence is then against itself.
        let evidence: Vec<Evidence> = found.try_iter().collect();
        assert!(evidence.iter().all(|one| judged(one) == Finding::Witness));
        assert!(evidence.is_empty() || deed != Deed::Die, "{deed:?}");
        assert_eq!(stage.standing(&host), Standing::Good);
    }
}

#[test]
fn the_witness_claims_the_row_that_differs_however_the_answer_was_cut() {
    let stage = audited(&[(0, 1), (0, 1), (2, 3)]);
    let found = evidence_on(&stage);
    let mut backend = stage.open();
    let host = stage.runs(&backend, 0).node();
    stage.ended(&mut backend, &PROMPT, 2);
    let length = backend.length();
    assert!((9..=11).contains(&length), "a piece begins before row 11");
    stage.until("the first call is not audited", || {
        stage.audits(&host).confirmed > 0
    });
    let auditor = stage.hosts[..2].iter().find(|one| one.node() != host);
    // The lie is in row 11 alone. Pieces of three rows from position 0 on would end behind it.
    auditor.unwrap().state().spoils = Some(|result: &mut StepResult| {
        let row = 11u32
            .checked_sub(result.position)
            .filter(|row| *row < result.rows);
        if let Some(row) = row {
            let mut data = result.data.to_vec();
            data[4 * WIDTH * row as usize] ^= 1;
            result.data = data.into();
        }
    });
    stage.ended(&mut backend, &[5, 6, 7, 8, 9, 7, 9], 1);
    let evidence = found.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(judged(&evidence), Finding::Witness);
}

#[test]
fn a_host_that_does_not_sign_is_avoided() {
    let stage = audited(&[(0, 1), (0, 1), (2, 3)]);
    let mut backend = stage.open();
    let host = stage.runs(&backend, 0);
    host.state().unsigned = true;
    let host = host.node();
    stage.answer(&mut backend, 3);
    stage.until("the host is not avoided", || {
        stage.standing(&host) == Standing::Failing
    });
    let failures = stage.health_of(&host).failures;
    assert_eq!(
        failures.keys().collect::<Vec<_>>(),
        [&FailureKind::Unsigned]
    );
    drop(backend);
    assert_ne!(stage.runs(&stage.open(), 0).node(), host);
}

/// Takes the evidence of audits on a stage.
fn evidence_on(stage: &Stage) -> std::sync::mpsc::Receiver<Evidence> {
    let (sender, found) = std::sync::mpsc::channel();
    let accuse = move |evidence| drop(sender.send(evidence));
    stage.health.on_evidence(Box::new(accuse));
    found
}

#[test]
fn a_wrong_receipt_brings_the_signed_claims_before_it_to_an_audit_without_a_draw() {
    let mut stage = Stage::new(&[(0, 1), (0, 1), (0, 1), (2, 3)]);
    stage.audit_share = NEVER;
    let found = evidence_on(&stage);
    let mut backend = stage.open();
    let liar = stage.runs(&backend, 0);
    liar.state().lies = Some(LIES[0]);
    let mut heard = stage.ended(&mut backend, &PROMPT, 5);
    assert_eq!(stage.all_audits().1, 0);
    // Now it signs other rows than it returns.
    liar.state().forges = Some(|receipt| receipt.chain[0] ^= 1);
    stage.call(&mut backend, &[5, 6, 7], 5, &mut heard).unwrap();
    assert_eq!(heard.degraded, ["receipt_mismatch"]);
    assert!(stage.audits(&liar.node()).mismatches > 0);
    let evidence = found.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(evidence.accused.statement.host, liar.addr.node);
}

#[test]
fn a_host_that_fails_the_call_does_not_escape_its_audit() {
    let stage = audited(&[(0, 1), (0, 1), (2, 3)]);
    let mut backend = stage.open();
    let host = stage.runs(&backend, 0).node();
    stage.hosts[2].at(12, Deed::Die);
    let ended = stage.call(&mut backend, &PROMPT, 9, &mut Heard::default());
    assert!(ended.is_err(), "no other host has its layers");
    drop(backend);
    stage.until("the first span is not audited", || {
        stage.audits(&host).confirmed > 0
    });
}

#[test]
fn what_this_machine_finds_when_it_takes_over_is_proved_by_an_audit() {
    for ranges in [&[(0, 3)][..], &[(0, 1), (2, 3)]] {
        let mut stage = Stage::new(ranges);
        stage.audit_share = NEVER;
        stage.here = Some(here());
        let found = evidence_on(&stage);
        let liar = &stage.hosts[0];
        liar.state().lies = Some(Lie::SkipsLayer);
        stage.take_over(liar);
        let evidence = found.recv_timeout(TIMEOUT).unwrap();
        assert_eq!(evidence.accused.statement.host, liar.addr.node);
        assert!(evidence.witness.is_none(), "this machine has computed it");
    }
}
