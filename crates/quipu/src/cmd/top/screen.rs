//! The table on a terminal.

use std::borrow::Cow;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Row as TableRow, Table};

use super::model::{Model, QP_COLUMNS, Row, widths};
use super::sockets;

/// Lines around the rows of a table: its frame and its headings.
const AROUND: usize = 3;
/// Columns between two.
const GAP: usize = 2;
/// The columns that may be cut: what is left of a name says something, what is left of a number says
/// something else.
const NAMES: [&str; 3] = ["PROGRAM", "ADDRESS", "PEER"];
/// They are not cut further.
const SHORTEST: usize = 8;

/// Draws it, as far down as `scroll`: first the engines run to their end, then the queue pairs. The largest
/// number that makes sense.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, scroll: usize) -> usize {
    let height = usize::from(frame.area().height);
    let engines = (model.engines.len().max(1) + AROUND).min(height / 2);
    let sockets = match model.sockets.len() {
        0 => 0,
        count => (count + AROUND).min(height / 4),
    };
    let areas = Layout::vertical([
        Constraint::Length(engines as u16),
        Constraint::Min(0),
        Constraint::Length(sockets as u16),
        Constraint::Length(1),
    ])
    .split(frame.area());
    let hidden = |rows: &[Row], area: usize| {
        let fit = usize::from(areas[area].height).saturating_sub(AROUND);
        rows.len().saturating_sub(fit)
    };
    let ends = [hidden(&model.engines, 0), hidden(&model.queue_pairs, 1)];
    let first = scroll.min(ends[0]);
    let begins = [first, (scroll - first).min(ends[1])];
    let title = match model.engines.len() {
        0 => " no engine of this user is running ".to_owned(),
        1 => " 1 engine ".to_owned(),
        count => format!(" {count} engines{} ", shown(count, begins[0], ends[0])),
    };
    let room = usize::from(frame.area().width).saturating_sub(2);
    let engines = table(title, model.engine_columns(), &model.engines, begins[0], room);
    frame.render_widget(engines, areas[0]);
    let count = model.queue_pairs.len();
    let title = format!(" {count} queue pairs{} ", shown(count, begins[1], ends[1]));
    let queue_pairs = table(title, &QP_COLUMNS, &model.queue_pairs, begins[1], room);
    frame.render_widget(queue_pairs, areas[1]);
    if sockets > 0 {
        let title = format!(" {} processes with sockets through memory ", model.sockets.len());
        let sockets = table(title, &sockets::COLUMNS, &model.sockets, 0, room);
        frame.render_widget(sockets, areas[2]);
    }
    frame.render_widget(Line::raw(" q quit   up/down scroll").style(Modifier::DIM), areas[3]);
    ends.iter().sum()
}

/// Which of a list that does not fit are shown, of which `hidden` are not.
fn shown(count: usize, begin: usize, hidden: usize) -> String {
    if hidden == 0 {
        return String::new();
    }
    format!(", {} to {}", begin + 1, begin + count - hidden)
}

/// How wide the columns are that there is room for: names are cut first, then the last columns are left out.
fn fitted(headings: &[&str], rows: &[Row], room: usize) -> Vec<usize> {
    let mut widths = widths(headings, rows);
    while widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1) > room {
        let columns = headings.iter().zip(&mut widths);
        let long = columns.filter(|(name, width)| NAMES.contains(name) && **width > SHORTEST);
        match long.map(|(_, width)| width).max() {
            Some(longest) => *longest -= 1,
            None => drop(widths.pop()),
        }
    }
    widths
}

/// What there is room for of a cell, which shows that it goes on.
fn cut(cell: &str, width: usize) -> Cow<'_, str> {
    if cell.chars().count() <= width {
        return cell.into();
    }
    cell.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

fn table<'a>(
    title: String,
    headings: &[&'a str],
    rows: &'a [Row],
    scroll: usize,
    room: usize,
) -> Table<'a> {
    let widths = fitted(headings, rows, room);
    let shown = headings.iter().take(widths.len());
    let head = TableRow::new(shown.map(|heading| Cell::from(*heading)))
        .style(Style::new().add_modifier(Modifier::BOLD));
    let lines = rows.iter().skip(scroll).map(|row| {
        let style = if row.alarming { Style::new().fg(Color::Red) } else { Style::new() };
        TableRow::new(row.cells.iter().zip(&widths).map(|(cell, &width)| cut(cell, width)))
            .style(style)
    });
    Table::new(lines, widths.iter().map(|&width| Constraint::Length(width as u16)))
        .header(head)
        .column_spacing(GAP as u16)
        .block(Block::bordered().title(title))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::sample;
    use super::*;

    fn screen(model: &Model, scroll: usize) -> (String, usize) {
        screen_of(96, model, scroll)
    }

    fn screen_of(width: u16, model: &Model, scroll: usize) -> (String, usize) {
        let mut terminal = Terminal::new(TestBackend::new(width, 14)).unwrap();
        let mut end = 0;
        terminal.draw(|frame| end = draw(frame, model, scroll)).unwrap();
        (terminal.backend().to_string(), end)
    }

    #[test]
    fn engines_and_queue_pairs_are_shown() {
        let before = [sample(7, 10, 100), sample(8, 10, 100)];
        let model = Model::new(vec![sample(7, 12, 300), sample(8, 12, 5_000_100)], &before, 0);
        let (text, end) = screen(&model, 0);
        insta::assert_snapshot!(text);
        assert_eq!(end, 0);
    }

    #[test]
    fn a_narrow_terminal_has_whole_numbers_and_fewer_columns() {
        let before = [sample(13_209, 10, 100)];
        let model = Model::new(vec![sample(13_209, 12, 20_600_100)], &before, 0);
        insta::assert_snapshot!(screen_of(60, &model, 0).0);
        for width in 1..60 {
            screen_of(width, &model, 0);
        }
    }

    #[test]
    fn a_long_list_scrolls_to_its_end() {
        let many = (1..=9).map(|process| sample(process, 10, 0)).collect();
        let model = Model::new(many, &[], 0);
        let (_, end) = screen(&model, 0);
        assert!(end > 0);
        // Everything is seen on the way.
        let all: String = (0..=end).map(|scroll| screen(&model, scroll).0).collect();
        for process in 1..=9 {
            let engine = format!("\"│{process}        ib_send_bw");
            assert!(all.contains(&engine), "{engine} in {all}");
        }
        let (text, same) = screen(&model, 1000);
        assert_eq!(same, end);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn nothing_is_shown_for_what_it_is() {
        assert!(screen(&Model::new(Vec::new(), &[], 0), 0).0.contains("no engine of this user"));
    }
}
