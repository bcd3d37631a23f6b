//! The table on a terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Row as TableRow, Table};

use super::model::{ENGINE_COLUMNS, Model, QP_COLUMNS, Row, widths};

/// Lines around the rows of a table: its frame and its headings.
const AROUND: usize = 3;

/// Draws it, as far down as `scroll`: first the engines run to their end, then the queue pairs. The largest
/// number that makes sense.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, scroll: usize) -> usize {
    let height = usize::from(frame.area().height);
    let engines = (model.engines.len().max(1) + AROUND).min(height / 2);
    let areas = Layout::vertical([
        Constraint::Length(engines as u16),
        Constraint::Min(0),
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
    frame.render_widget(table(title, &ENGINE_COLUMNS, &model.engines, begins[0]), areas[0]);
    let count = model.queue_pairs.len();
    let title = format!(" {count} queue pairs{} ", shown(count, begins[1], ends[1]));
    frame.render_widget(table(title, &QP_COLUMNS, &model.queue_pairs, begins[1]), areas[1]);
    frame.render_widget(Line::raw(" q quit   up/down scroll").style(Modifier::DIM), areas[2]);
    ends.iter().sum()
}

/// Which of a list that does not fit are shown, of which `hidden` are not.
fn shown(count: usize, begin: usize, hidden: usize) -> String {
    if hidden == 0 {
        return String::new();
    }
    format!(", {} to {}", begin + 1, begin + count - hidden)
}

fn table<'a>(title: String, headings: &[&'a str], rows: &'a [Row], scroll: usize) -> Table<'a> {
    let widths = widths(headings, rows);
    let head = TableRow::new(headings.iter().map(|heading| Cell::from(*heading)))
        .style(Style::new().add_modifier(Modifier::BOLD));
    let lines = rows.iter().skip(scroll).map(|row| {
        let style = if row.alarming { Style::new().fg(Color::Red) } else { Style::new() };
        TableRow::new(row.cells.iter().map(String::as_str)).style(style)
    });
    Table::new(lines, widths.iter().map(|&width| Constraint::Length(width as u16)))
        .header(head)
        .column_spacing(2)
        .block(Block::bordered().title(title))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::sample;
    use super::*;

    fn screen(model: &Model, scroll: usize) -> (String, usize) {
        let mut terminal = Terminal::new(TestBackend::new(96, 14)).unwrap();
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
