//! Options that variables of the environment stand for.

use std::ffi::{OsStr, OsString};
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, Resettable, TypedValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

/// Reads the command line. What is wrong with it ends the process.
pub(super) fn read(command: Command) -> ArgMatches {
    parse(command, std::env::args_os()).unwrap_or_else(|error| {
        if error.kind() != ErrorKind::ValueValidation {
            error.exit();
        }
        eprint!("{}", plain(&error.to_string()));
        std::process::exit(error.exit_code());
    })
}

/// The standard library's errors for numbers and addresses, in words that say what to write instead.
const PLAIN: [(&str, &str); 7] = [
    ("invalid digit found in string", "it is not a whole number"),
    ("cannot parse integer from empty string", "it is not a whole number"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("invalid float literal", "it is not a number"),
    ("invalid IP address syntax", "it is not an IP address, such as 10.0.0.1 or fd00::1"),
    (
        "invalid socket address syntax",
        "it is not an address with a port, such as 127.0.0.1:5000 or [::1]:5000",
    ),
];

/// An error message without the words of the standard library.
fn plain(message: &str) -> String {
    PLAIN.iter().fold(message.to_owned(), |text, (word, plain)| text.replace(word, plain))
}

pub(super) fn parse(
    command: Command,
    words: impl IntoIterator<Item = OsString>,
) -> Result<ArgMatches, clap::Error> {
    let mut command = without_blanks(command);
    let matches = command.try_get_matches_from_mut(words)?;
    refuse_link_of_socket(&mut command, &matches)?;
    Ok(matches)
}

/// A blank variable counts as not set: `QUIPU_ADDRESS= quipu run` is how a shell, or a file of CI, takes it
/// back for one command. For clap it is an empty value.
fn without_blanks(command: Command) -> Command {
    let is_set = |arg: &Arg| arg.get_env().is_none_or(|name| value(name).is_some());
    command
        .mut_args(|arg| if is_set(&arg) { arg } else { arg.env(Resettable::Reset) })
        .mut_subcommands(without_blanks)
}

/// The value of a variable, unless it is blank.
pub(super) fn value(name: impl AsRef<OsStr>) -> Option<OsString> {
    let is_blank = |value: &OsString| value.to_str().is_some_and(|text| text.trim().is_empty());
    std::env::var_os(name).filter(|value| !is_blank(value))
}

/// `--socket` needs no link; that a variable names one is no contradiction, but an option is.
fn refuse_link_of_socket(
    mut command: &mut Command,
    matches: &ArgMatches,
) -> Result<(), clap::Error> {
    let mut tool = matches;
    while let Some((name, inner)) = tool.subcommand() {
        tool = inner;
        command = command.find_subcommand_mut(name).expect("it was found in the words");
    }
    let is_given = |name| {
        tool.try_contains_id(name).is_ok()
            && tool.value_source(name) == Some(ValueSource::CommandLine)
    };
    if is_given("socket") && is_given("link") {
        let text = "the argument '--socket' cannot be used with '--link <LINK>'";
        return Err(command.error(ErrorKind::ArgumentConflict, text));
    }
    Ok(())
}

/// Takes one of some words, which may have blanks around it in a variable.
#[derive(Clone)]
pub(super) struct OneOf(pub(super) &'static [&'static str]);

impl TypedValueParser for OneOf {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        let trimmed = value.to_str().map_or(value, |text| OsStr::new(text.trim()));
        PossibleValuesParser::new(self.0).parse_ref(command, arg, trimmed)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(PossibleValue::new)))
    }
}

/// Reads a value, which may have blanks around it in a variable.
pub(super) fn trimmed<T: FromStr>(text: &str) -> Result<T, T::Err> {
    text.trim().parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command with an option of that variable, and a tool of `quipu qpip`.
    fn command() -> Command {
        let socket = Arg::new("socket").long("socket").action(clap::ArgAction::SetTrue);
        // Set to something wherever the tests run.
        let link = Arg::new("link").long("link").env("PATH");
        Command::new("x").subcommand(Command::new("tool").args([socket, link]))
    }

    #[test]
    fn values_that_do_not_parse_are_explained_in_plain_words() {
        let errors = [
            "x".parse::<u32>().unwrap_err().to_string(),
            "".parse::<u32>().unwrap_err().to_string(),
            "9999999999".parse::<u32>().unwrap_err().to_string(),
            "-1".parse::<u8>().unwrap_err().to_string(),
            "x".parse::<f64>().unwrap_err().to_string(),
            "x".parse::<std::net::IpAddr>().unwrap_err().to_string(),
            "x".parse::<std::net::SocketAddr>().unwrap_err().to_string(),
        ];
        for error in errors {
            assert!(plain(&error) != error, "{error}");
        }
    }

    #[test]
    fn a_socket_has_no_link_unless_it_is_a_variable() {
        let words = |words: &str| words.split(' ').map(OsString::from).collect::<Vec<_>>();
        let said = |line: &str| parse(command(), words(line)).map_err(|error| error.kind());
        assert!(said("x tool --socket").is_ok() && said("x tool --link a").is_ok());
        assert_eq!(said("x tool --socket --link a").unwrap_err(), ErrorKind::ArgumentConflict);
        let error = parse(command(), words("x tool --socket --link a")).unwrap_err().to_string();
        assert!(error.contains("Usage: x tool"), "{error}");
    }

    #[test]
    fn blanks_around_a_value_do_not_matter() {
        assert_eq!(trimmed::<u8>(" 7 "), Ok(7));
        assert!(trimmed::<u8>("").is_err());
    }
}
