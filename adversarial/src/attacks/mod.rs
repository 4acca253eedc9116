//! Attacks: one file or one function of `table.rs` each, named after the claim that must hold.

use crate::attack::{Entry, Run};
use crate::memory::Budget;
use crate::victim::Scene;

mod prelude;
mod table;
mod template;

/// Registry: one line per attack, with the number of its case and the name of its file or of its
/// function in `table.rs`. Calls another macro with all entries, from which the registry and the
/// tests are made. An attack that is known to succeed stays in, marked `#[ignore = "why"]`; the
/// tests skip it, the report does not.
#[macro_export]
macro_rules! every_attack {
    ($apply:ident) => {
        $apply! {
            table {
                1 payload_length_mismatch_closes_the_session;
                3 an_unknown_version_type_flag_or_reserved_bit_closes_the_session;
                4 a_known_frame_in_the_wrong_state_closes_the_session;
                5 a_gap_duplicate_or_wrap_in_the_sequence_closes_the_session;
                6 a_flood_of_fragments_or_control_frames_is_cut_off;
                7 a_message_that_is_not_masked_binary_closes_the_session;
                8 a_chunk_beyond_the_window_closes_the_session;
                9 a_grant_above_the_ceiling_closes_the_session;
                11 credit_withheld_past_the_deadline_closes_the_session;
                12 an_oversized_first_frame_creates_no_stream;
                13 streams_opened_and_cancelled_too_fast_close_the_session;
                14 a_chunk_below_the_agreed_size_closes_the_session;
                29 a_stream_for_other_weights_is_refused;
                34 an_impossible_shape_is_refused;
                41 a_chunk_that_does_not_decompress_to_its_size_closes_the_session;
            }
            files {
                2 a_declared_length_is_capped_and_reserves_no_memory;
                10 an_ack_of_an_unsent_chunk_closes_the_session;
                15 a_key_that_is_not_admitted_gets_no_session;
                16 an_impostor_host_receives_no_data;
                17 a_token_is_bound_to_its_subject;
                18 a_token_is_good_for_one_session_at_one_node;
                19 a_token_is_refused_outside_its_validity;
                20 only_strictly_valid_signatures_are_accepted;
                21 revocation_disconnects_at_once_and_for_good;
                22 an_event_with_a_forged_author_is_refused;
                23 a_fork_freezes_its_author_everywhere;
                24 an_old_descriptor_cannot_be_replayed;
                25 a_far_future_event_is_refused_and_blocks_no_member;
                26 an_event_flood_ends_at_the_authors_quota;
                27 acknowledged_events_survive_a_kill_and_a_torn_tail;
                28 an_impossible_layer_range_is_never_routed;
                30 descriptor_claims_attract_no_extra_chats;
                31 a_descriptor_flood_hides_no_other_host;
                32 late_results_of_a_replaced_host_are_dropped;
                33 rows_that_are_not_finite_are_refused;
                35 fabricated_rows_do_not_change_the_answer;
                36 a_steering_host_is_convicted_by_a_third_node;
                37 coarser_weights_are_convicted_by_a_third_node;
                38 an_fp16_overflow_bans_no_host;
                39 a_slow_peer_is_disconnected_by_a_deadline;
                40 a_deliberately_slow_host_is_replaced;
                42 half_open_connections_lock_out_no_member;
                43 abandoned_streams_are_freed;
                44 a_prompt_leaves_no_trace;
                45 a_caller_within_its_kv_share_is_not_preempted;
                46 no_row_sent_to_a_host_is_in_the_embedding_table;
                47 a_demoted_anchor_cannot_back_date_events;
                48 revocation_ends_the_members_invite;
                49 a_lamport_leap_moves_no_other_clock;
                50 events_of_a_wrong_clock_count_once_it_is_right;
                51 a_member_cannot_direct_nodes_at_third_parties;
                52 joins_per_invite_code_are_limited;
                53 refolding_of_early_events_is_bounded;
                54 silent_strangers_lock_out_no_member;
                55 strangers_cannot_exhaust_the_call_sockets;
                56 calls_without_a_proof_lock_out_no_joiner;
                57 a_member_cannot_monopolise_a_host;
                58 the_owner_always_gets_a_stream_slot;
                59 a_revoked_or_demoted_host_receives_no_rows;
                60 dns_rebinding_is_refused;
                61 back_dated_events_are_detected_and_have_no_effect;
                62 a_joiner_detects_a_truncated_log;
                63 the_root_key_can_deliver_only_root_events;
                64 a_forked_root_key_stays_valid;
                65 a_frozen_node_recovers_by_the_root_key_only;
                66 invited_members_share_the_gossip_budget;
                67 swapped_prompt_rows_are_detected;
                68 duplicated_prompt_rows_are_detected;
                70 neighbours_detect_a_changed_template;
                71 chat_templates_have_bounded_time_and_memory;
                72 a_forged_hash_cache_record_is_ignored;
                73 a_changed_template_changes_the_text_identity;
                74 neighbours_cannot_block_the_owners_chats;
                75 another_local_user_learns_and_blocks_nothing;
                76 slow_http_requests_lock_out_no_client;
                77 silent_connections_do_not_block_the_local_api;
                78 untrusted_text_cannot_control_the_terminal;
                79 a_compromised_daemon_stays_confined;
                80 no_member_fills_the_replay_cache;
                84 invited_members_share_the_socket_limit;
                85 two_neighbours_within_their_share_are_served;
                86 stream_churn_is_limited_across_sessions;
                87 a_flood_of_short_steps_delays_no_other_caller;
                88 slander_convicts_no_honest_host;
                89 an_auditor_that_leaves_frames_no_honest_host;
                90 a_witness_is_heard_about_its_own_rows_only;
                81 untrusted_text_forges_no_log_line;
                82 untrusted_text_is_harmless_in_status_and_diagnose;
                83 untrusted_text_runs_in_no_browser;
            }
        }
    };
}

macro_rules! register {
    (
        table { $($(#[$listed_mark:meta])* $listed_case:literal $listed:ident;)* }
        files { $($(#[$mark:meta])* $case:literal $name:ident;)* }
    ) => {
        $(mod $name;)*

        /// Every attack, in the order of the registry.
        pub const ATTACKS: &[Entry] = &[
            $(entry(
                $listed_case,
                stringify!($listed),
                include_str!("table.rs"),
                |bench, found| Box::pin(table::carry_out(bench, table::$listed(bench), found)),
            ),)*
            $(entry(
                $case,
                stringify!($name),
                include_str!(concat!(stringify!($name), ".rs")),
                |bench, found| Box::pin($name::run(bench, found)),
            ),)*
        ];
    };
}

every_attack!(register);

/// Attack from which `hearthnet adversarial new` makes a new one. No run includes it; a test does.
pub const TEMPLATE: Entry = entry(
    0,
    "template",
    include_str!("template.rs"),
    |bench, found| Box::pin(template::run(bench, found)),
);

/// Registry entry with the settings of its case. Most need a host outside of any community, can be
/// repeated, and have a memory budget of two sessions.
const fn entry(case: u8, name: &'static str, source: &'static str, run: Run) -> Entry {
    let scene = match case {
        21..=28 | 42 | 47..=56 | 58..=59 | 61..=66 | 80 | 82 | 84 => Scene::COMMUNITY,
        45 => a_caller_within_its_kv_share_is_not_preempted::SCENE,
        _ => Scene::ALONE,
    };
    let budget = match case {
        2 => a_declared_length_is_capped_and_reserves_no_memory::BUDGET,
        // Data is echoed: it is held once as received and once as queued, within the limits of the
        // receive and send buffers.
        8 => Budget::SESSION.and(
            128 << 20,
            "the 64 MiB each that a session may have received and queued, and 8 MiB of noise",
        ),
        26 => Budget::SESSION.and(
            24 << 20,
            "four batches of 512 KiB as they arrive and are decoded, the database's cache of 16 MiB \
             and the index of what is kept",
        ),
        85 => Budget::sessions(2, "the two neighbours'"),
        87 => Budget::sessions(3, "the flood's, the guest's, and one that is closing"),
        57 => Budget::sessions(19, "those of the attacker, the guest's, and one that is closing"),
        45 => Budget::sessions(3, "the grabber, the guest, and one that is closing"),
        _ => Budget::SESSION,
    };
    Entry {
        name,
        case,
        scene,
        // These cases change the victim for good or for a while: a revoked, frozen or demoted key,
        // events that stay in the log, a used-up quota or budget, a taken name, a killed node, a
        // hostile file.
        repeats: !matches!(case, 21 | 23 | 25..=28 | 47 | 49..=53 | 59 | 61..=66 | 71..=73 | 80 | 82 | 84 | 86),
        budget,
        any_model: !matches!(case, 28 | 59),
        source,
        run,
    }
}
