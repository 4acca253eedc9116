//! Receipts of the scripted hosts, honest in all tests of this folder unless said otherwise.

use super::*;
use crate::backend::pipeline::even_cut;
use crate::hosts::health::AuditCounts;

/// Codes for which a host was left.
fn degraded(heard: &Heard) -> Vec<&str> {
    heard.degraded.iter().map(Code::as_str).collect()
}

#[test]
fn every_answer_of_honest_hosts_is_covered_by_a_receipt_in_the_end() {
    for prefill_rows in [1, 3, 5, 24] {
        let stage = Stage::new(&[(0, 1), (2, 3)]);
        let mut backend = stage.open_with(in_pieces_of(prefill_rows)).unwrap();
        let mut heard = stage.answer(&mut backend, 7);
        stage.call(&mut backend, &[5, 6, 7], 4, &mut heard).unwrap();
        drop(backend);
        assert_eq!(degraded(&heard), [""; 0]);
        let counts = |host: &Puppet| stage.health_of(&host.node()).audits;
        stage.until("a receipt is missing", || {
            let all_are_signed = |AuditCounts {
                                      answers, signed, ..
                                  }| answers == signed;
            stage.hosts.iter().all(|host| all_are_signed(counts(host)))
        });
        // The last host returns one row of each prompt; the first one each of its chunks.
        let chunks = |rows: usize| rows.div_ceil(even_cut(rows, prefill_rows)) as u64;
        assert_eq!(
            counts(&stage.hosts[0]).answers,
            chunks(8) + 7 + chunks(3) + 4
        );
        assert_eq!(counts(&stage.hosts[1]).answers, 8 + 5);
        stage.all_are_good();
    }
}

#[test]
fn receipts_of_honest_hosts_are_right_whenever_a_host_fails() {
    for span in [0, 1] {
        for position in [0, 7, 8, 15] {
            for deed in [Deed::Die, Deed::Leave, Deed::Preempt] {
                let (stage, heard, _) = with_deed(span, position, deed);
                let wrong = heard
                    .degraded
                    .iter()
                    .any(|code| *code == "receipt_mismatch");
                assert!(!wrong, "{deed:?} of host {span} at {position}");
                assert_eq!(stage.quarantined(), 0);
            }
        }
    }
}

#[test]
fn a_host_whose_receipt_is_not_for_its_rows_is_replaced_and_quarantined() {
    let forgeries: [fn(&mut Receipt); 4] = [
        |receipt| receipt.chain[0] ^= 1,
        |receipt| receipt.signature[0] ^= 1,
        |receipt| receipt.claims = 1.try_into().unwrap(),
        |receipt| receipt.claims = 1000.try_into().unwrap(),
    ];
    for forge in forgeries {
        let stage = Stage::new(&[(0, 1), (0, 1), (2, 3)]);
        let mut backend = stage.open();
        let liar = stage.runs(&backend, 0);
        liar.state().forges = Some(forge);
        let heard = stage.answer(&mut backend, 12);
        assert_eq!(degraded(&heard), ["receipt_mismatch"]);
        assert_eq!(
            stage.health_of(&liar.node()).standing,
            Standing::Quarantined
        );
        drop(backend);
        stage.until_empty();
    }
}

#[test]
fn a_wrong_receipt_after_the_end_of_its_stream_counts_too() {
    let stage = Stage::new(&[(0, 3)]);
    let mut backend = stage.open();
    let liar = &stage.hosts[0];
    liar.state().unsigned = true;
    stage.answer(&mut backend, 2);
    assert_eq!(stage.health_of(&liar.node()).audits.signed, 0);
    {
        let mut state = liar.state();
        state.unsigned = false;
        state.forges = Some(|receipt| receipt.chain[0] ^= 1);
    }
    drop(backend);
    stage.until("the wrong receipt is not noticed", || {
        stage.health_of(&liar.node()).standing == Standing::Quarantined
    });
}

#[test]
fn a_host_without_receipts_is_used_and_its_answers_count_as_unsigned() {
    let stage = Stage::new(&[(0, 3)]);
    stage.hosts[0].state().unsigned = true;
    let mut backend = stage.open();
    stage.answer(&mut backend, 12);
    let AuditCounts {
        answers, signed, ..
    } = stage.health_of(&stage.hosts[0].node()).audits;
    assert_eq!((answers, signed), (13, 0));
}
