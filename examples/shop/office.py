"""The back office, a page of Flask with the client without asyncio: flask --app examples.shop.office run.

It shows how far the workers are, changes prices, and hands dead letters out again.
"""

from __future__ import annotations

from flask import Flask, redirect, render_template_string, request
from werkzeug.wrappers import Response

import qmq
import qmq.sql
from examples.shop.store import Store

PAGE = """
<!doctype html><title>Back office</title>
<h1>Prices</h1>
{% for item, cents in prices.items() %}
<form method="post" action="/prices"><input type="hidden" name="item" value="{{ item }}">
{{ item }} <input name="cents" value="{{ cents }}"> <button>change</button></form>
{% endfor %}
<h1>Workers</h1>
<table><tr><th>group<th>waiting<th>in flight<th>to be repeated<th>dead</tr>
{% for group in groups %}
<tr><td>{{ group.name }}<td>{{ group.ready }}<td>{{ group.in_flight }}<td>{{ group.in_retry }}<td>{{ group.dead }}</tr>
{% endfor %}</table>
<h1>Orders that could not be charged</h1>
<ul>{% for letter in letters %}<li>{{ letter.id }}: {{ letter.reason }}</li>{% else %}<li>none</li>{% endfor %}</ul>
<form method="post" action="/redrive"><button>try them again</button></form>
"""


def make_app() -> Flask:
    """Return the app. Its client connects at the first call, in each process of a server that forks."""
    app = Flask(__name__)
    store = Store()
    client = qmq.connect_sync(name="shop-office", wait=30)
    outbox = qmq.sql.Outbox(client)

    @app.get("/")
    def show() -> str:
        groups = client.admin.groups()
        has_billing = any(group.name == "billing" for group in groups)
        letters = list(client.admin.dead_letters("billing")) if has_billing else []
        return render_template_string(PAGE, prices=store.prices(), groups=groups, letters=letters)

    @app.post("/prices")
    def change_price() -> Response:
        item, cents = request.form["item"], int(request.form["cents"])
        with store.engine.begin() as tx:
            store.set_price(tx, item, cents)
            outbox.send(tx, "shop.price.changed", json={"item": item, "cents": cents}, key=item)
        return redirect("/", 303)

    @app.post("/redrive")
    def redrive() -> Response:
        client.admin.redrive("billing", all=True)
        return redirect("/", 303)

    return app
