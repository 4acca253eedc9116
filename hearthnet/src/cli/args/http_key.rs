//! Arguments of `http-key`.

#[derive(Debug, clap::Subcommand)]
pub(crate) enum HttpKeyCommand {
    /// Make a key and print it, which is the only time that it is shown.
    Add(AddKeyArgs),
    /// List the keys and their limits.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a key. A running node refuses it from the next request on.
    Remove {
        /// Name of the key.
        name: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct AddKeyArgs {
    /// Name of the key: 1 to 32 letters, digits, `-` and `_`.
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// Requests at a time, those that wait included [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) requests: Option<u32>,
    /// Tokens of prompts and answers per minute [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tokens_per_minute: Option<u64>,
    /// Tokens of prompts and answers per day [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tokens_per_day: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_name(text: &str) -> Result<String, String> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
    match (1..=32).contains(&text.len()) && text.bytes().all(fits) {
        true => Ok(text.to_owned()),
        false => Err("write 1 to 32 letters, digits, - and _".to_owned()),
    }
}
