//! The attacks: one file each, or one function in `table.rs`, whose name is the claim that must hold.

use crate::attack::{Entry, Run};
use crate::memory::Budget;
use crate::victim::Scene;

mod table;

/// The registry: one line per attack, which is the name of its file, or of its function in
/// `table.rs`, with the number of its case. Calls another macro with all of them; the registry itself and
/// the tests are made of it. An attack that is known not to hold stays in, marked with
/// `#[ignore = "why"]`, which the tests obey and the report does not.
#[macro_export]
macro_rules! every_attack {
    ($apply:ident) => {
        $apply! {
            table {
                1 a_length_that_disagrees_with_the_message_closes_the_session;
                3 an_unknown_version_type_flag_or_reserved_bit_closes_the_session;
                4 a_known_frame_in_the_wrong_state_closes_the_session;
                5 a_gap_duplicate_or_wrap_in_the_sequence_closes_the_session;
                6 a_flood_of_fragments_or_control_frames_is_cut_off;
                7 what_is_not_a_masked_binary_message_closes_the_session;
                8 a_chunk_beyond_the_window_closes_the_session;
                9 a_grant_above_the_ceiling_closes_the_session;
                11 credit_withheld_past_the_deadline_closes_the_session;
                12 an_oversized_first_frame_creates_no_stream;
                13 streams_opened_and_cancelled_too_fast_close_the_session;
                14 a_chunk_below_the_agreed_size_closes_the_session;
                29 a_stream_for_other_weights_is_refused;
                34 a_shape_that_cannot_be_is_refused;
                41 a_chunk_that_does_not_decompress_to_its_size_closes_the_session;
            }
            files {
                2 what_a_header_declares_is_capped_and_reserves_nothing;
                10 an_ack_of_what_was_never_sent_closes_the_session;
                15 a_key_that_is_not_admitted_gets_no_session;
                16 whoever_answers_in_anothers_place_learns_nothing;
                17 a_token_is_worth_nothing_to_anybody_else;
                18 a_token_is_good_for_one_session_at_one_node;
                19 a_token_is_worth_nothing_out_of_its_time;
                20 only_strictly_valid_signatures_are_believed;
                21 a_revoked_member_is_out_at_once_and_stays_out;
                22 nobody_writes_into_the_log_in_anothers_name;
                23 two_histories_of_one_author_freeze_it_everywhere;
                24 an_old_descriptor_does_not_come_back;
                25 a_time_far_ahead_is_refused_and_stops_nobody;
                26 a_flood_of_events_ends_at_its_authors_quota;
                27 what_was_acknowledged_survives_a_kill_and_a_torn_tail;
                28 a_range_that_no_model_has_is_routed_by_nobody;
                30 no_claim_draws_more_than_its_share_of_chats;
                31 a_flood_of_descriptors_hides_no_other_host;
                32 a_late_answer_of_a_replaced_host_changes_no_text;
                33 rows_that_are_not_finite_are_refused;
                35 rows_that_a_host_makes_up_cost_no_word;
                38 a_text_that_overflows_fp16_bans_no_host;
                39 a_peer_that_dawdles_is_ended_by_a_deadline;
                40 who_is_slow_on_purpose_is_left_for_another;
                42 ten_thousand_connections_without_a_word_keep_no_member_out;
                43 streams_that_are_abandoned_are_freed;
                44 what_was_asked_is_left_nowhere;
                45 a_caller_within_its_share_of_the_memory_keeps_it;
                46 no_row_that_a_host_gets_is_in_the_embedding_table;
                47 who_loses_a_level_cannot_write_into_the_past;
                48 an_invite_ends_with_whom_it_let_in;
                49 a_leap_in_time_dates_nobodys_events_ahead;
                50 what_a_wrong_clock_wrote_is_heard_once_it_is_right;
                51 nobody_knocks_where_a_member_points;
                52 one_code_lets_no_crowd_in;
                53 events_that_sort_first_cost_no_core;
                54 silent_strangers_keep_no_member_out;
                55 strangers_hold_no_socket_that_a_joiner_or_a_member_needs;
                56 calls_without_a_proof_keep_no_joiner_out;
                57 a_member_has_no_more_than_its_share_of_a_host;
                58 the_owner_of_a_machine_has_a_place_on_it;
                59 a_host_that_lost_its_right_sees_no_more_rows;
                60 a_page_that_pretends_to_be_this_machine_gets_nothing;
                61 what_is_dated_back_shows_and_counts_for_nothing;
                62 a_joiner_hears_what_who_let_it_in_kept_back;
                63 the_root_key_is_heard_for_its_own_word_alone;
                64 one_root_key_in_two_places_keeps_its_word;
                65 who_froze_itself_comes_back_by_the_root_alone;
                66 who_invites_many_has_no_more_of_a_neighbour;
                67 rows_of_a_prompt_keep_their_places;
                68 one_row_does_not_stand_for_others;
                70 a_changed_template_is_told_apart_by_the_neighbours;
                71 no_chat_template_takes_the_callers_time_or_memory;
                72 what_is_remembered_of_a_file_is_this_machines_own_word;
                73 a_changed_template_shows_although_the_weights_are_genuine;
                74 neighbours_keep_no_service_from_its_owner;
                75 another_user_of_the_machine_learns_and_takes_nothing;
                76 requests_that_never_end_keep_nobody_out;
                77 silent_connections_hide_no_local_api;
                78 words_of_others_steer_no_terminal;
                79 a_daemon_that_is_taken_over_stays_in_its_place;
                80 no_member_fills_the_memory_of_calls;
                84 a_crowd_that_one_let_in_holds_no_neighbours_socket;
                85 two_neighbours_who_keep_to_their_share_are_served;
                86 who_opens_streams_in_session_after_session_is_stopped;
                87 one_callers_short_steps_leave_others_their_turns;
                81 words_of_others_forge_no_line_of_a_log;
                82 words_of_others_steer_nothing_that_a_node_shows;
                83 words_of_others_run_in_no_page;
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
            $(entry($listed_case, stringify!($listed), |bench, found| {
                Box::pin(table::carry_out(bench, table::$listed(bench), found))
            }),)*
            $(entry($case, stringify!($name), |bench, found| Box::pin($name::run(bench, found))),)*
        ];
    };
}

every_attack!(register);

/// An attack with what its case needs: for most, a host outside of any community, as often as one
/// likes, and the memory of two sessions.
const fn entry(case: u8, name: &'static str, run: Run) -> Entry {
    let scene = match case {
        21..=28 | 42 | 47..=56 | 58..=59 | 61..=66 | 80 | 82 | 84 => Scene::COMMUNITY,
        45 => a_caller_within_its_share_of_the_memory_keeps_it::SCENE,
        _ => Scene::ALONE,
    };
    let budget = match case {
        2 => what_a_header_declares_is_capped_and_reserves_nothing::BUDGET,
        // What arrives is echoed: it is held once as received and once as queued, never more than
        // the receive and send buffers that the limits name.
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
        // A revoked key never comes back, nothing thaws a frozen one, a leap in time is made once
        // and lasts, a quota is used up for good, a node that is killed has a folder of its own,
        // who was demoted is no anchor, what sorts first goes on doing so, what the root has said stays
        // said, budgets are used up for a while, a member has its name, and files are hostile once.
        repeats: !matches!(case, 21 | 23 | 25..=28 | 47 | 49..=53 | 59 | 61..=66 | 71..=73 | 80 | 82 | 84 | 86),
        budget,
        run,
    }
}
