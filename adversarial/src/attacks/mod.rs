//! The attacks: one file each, or one function in `table.rs`, whose name is the claim that must hold.

use crate::attack::Entry;
use crate::memory::Budget;

pub(crate) mod table;

/// The registry: one line per attack, which is the name of its file, or of its function in
/// `table.rs`, with its case there. Calls another macro with all of them; the registry itself and
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
                what_a_header_declares_is_capped_and_reserves_nothing;
                an_ack_of_what_was_never_sent_closes_the_session;
                a_key_that_is_not_admitted_gets_no_session;
                whoever_answers_in_anothers_place_learns_nothing;
                a_token_is_worth_nothing_to_anybody_else;
                a_token_is_good_for_one_session_at_one_node;
                a_token_is_worth_nothing_out_of_its_time;
                only_strictly_valid_signatures_are_believed;
                a_revoked_member_is_out_at_once_and_stays_out;
                nobody_writes_into_the_log_in_anothers_name;
                two_histories_of_one_author_freeze_it_everywhere;
                an_old_descriptor_does_not_come_back;
                a_time_far_ahead_is_refused_and_stops_nobody;
                a_flood_of_events_ends_at_its_authors_quota;
                what_was_acknowledged_survives_a_kill_and_a_torn_tail;
                rows_that_are_not_finite_are_refused;
                rows_that_a_host_makes_up_cost_no_word;
                a_peer_that_dawdles_is_ended_by_a_deadline;
                streams_that_are_abandoned_are_freed;
                a_caller_within_its_share_of_the_memory_keeps_it;
                no_row_that_a_host_gets_is_in_the_embedding_table;
                who_loses_a_level_cannot_write_into_the_past;
            }
        }
    };
}

macro_rules! register {
    (
        table { $($(#[$listed_mark:meta])* $case:literal $listed:ident;)* }
        files { $($(#[$mark:meta])* $name:ident;)* }
    ) => {
        $(mod $name;)*

        /// Every attack, in the order of the registry.
        pub const ATTACKS: &[Entry] = &[
            $(Entry::listed($case, stringify!($listed), table::$listed, budget($case)),)*
            $(Entry::of::<$name::Attack>(stringify!($name)),)*
        ];
    };
}

every_attack!(register);

/// What the victim may grow by in an attack of the table.
const fn budget(case: u8) -> Budget {
    match case {
        // What arrives is echoed: it is held once as received and once as queued, never more than
        // the receive and send buffers that the limits name.
        8 => Budget::SESSION.and(
            128 << 20,
            "the 64 MiB each that a session may have received and queued, and 8 MiB of noise",
        ),
        _ => Budget::SESSION,
    }
}
